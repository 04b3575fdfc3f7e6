/* What holds while the calls are placed. */
#include "handle/layer_calls.h"

#include "base/check.h"
#include "torch/names.h"

void layer_calls_check(const struct layer_calls *layers) {
    (void)layers; /* without FSDP_C_CHECK */
    for (int64_t i = 0; layers->placed && i < layers->count; i++)
        INVARIANT(layers->all[i].compiled ||
                  PyDict_GetItemWithError(layers->all[i].attributes, torch_names._compiled_call_impl));
}
