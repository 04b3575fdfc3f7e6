#include "runtime/operations.h"

#include <string.h>

#include "torch/ref.h"

#include "base/check.h"

struct operations operations;

static const struct operations *whose(PyObject *const *replaced, enum replaceable which) {
    return replaced[which] ? &operations_calls : &operations_own;
}

/* The entries that go with what was replaced. */
static void choose(struct operations *table, PyObject *const *replaced) {
    table->gather = whose(replaced, REPLACEABLE_UNSHARD)->gather;
    table->reshard = whose(replaced, REPLACEABLE_RESHARD)->reshard;
    table->post_backward_reshard = whose(replaced, REPLACEABLE_POST_BACKWARD_RESHARD)->post_backward_reshard;
    table->prefetch = whose(replaced, REPLACEABLE_GET_HANDLE_TO_PREFETCH)->prefetch;
    table->register_pre_backward_hooks =
        whose(replaced, REPLACEABLE_REGISTER_PRE_BACKWARD_HOOKS)->register_pre_backward_hooks;
    table->register_post_backward_hook =
        whose(replaced, REPLACEABLE_REGISTER_POST_BACKWARD_HOOK)->register_post_backward_hook;
}

void operations_init(struct operations *table) {
    choose(table, table->replaced);
}

int operations_replace(struct operations *table, const char *name, PyObject *function) {
    static const char *const names[REPLACEABLES] = {
        "unshard",
        "_reshard",
        "_post_backward_reshard",
        "_get_handle_to_prefetch",
        "_register_pre_backward_hooks",
        "_register_post_backward_hook",
    };
    for (int i = 0; i < REPLACEABLES; i++) {
        if (strcmp(names[i], name) != 0)
            continue;
        ref_set(&table->replaced[i], function == Py_None ? NULL : Py_NewRef(function));
        operations_init(table);
        return 0;
    }
    return RAISED(PyExc_ValueError, "%s is not called by this runtime, so that nothing can take its place",
                  name);
}

void operations_check(const struct operations *table) {
    struct operations expected = *table;
    choose(&expected, table->replaced);
    INVARIANT(!memcmp(&expected, table, sizeof expected));
}
