/* The one adapter to torch.distributed. Collectives are enqueued and waited for by separate verbs.
 *
 * The fast way calls the ProcessGroup object's own methods with the options torch.distributed would pass.
 * Where somebody has replaced a collective of torch.distributed (a mock, a logger, a wrapper), the
 * replacement is called instead. */
#ifndef FSDP_COLLECTIVE_COLLECTIVE_H
#define FSDP_COLLECTIVE_COLLECTIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct collective_group {
    /* owned; a ProcessGroup, or NULL when there is none, or it was let go */
    PyObject *group;
    PyObject *gather_group, *scatter_group; /* owned; the group, or a fake one of the same rank and size */
    PyObject *all_gather, *reduce_scatter, *all_reduce; /* owned; bound methods of the three groups */
    int64_t world_size;
    int64_t rank;
    /* borrowed; all that are initialised, NULL when this one is not */
    struct collective_group *previous, *next;
    pid_t process; /* which initialised it; threads of the group run there alone */
};

/* Find torch.distributed's functions, to know later whether they were replaced. 0 or -1. */
int collective_init(void);

int collective_group_init(struct collective_group *group, PyObject *process_group); /* 0 or -1 */
/* Send all-gathers or reduce-scatters of the group to `fake`, which sends nothing. 0 or -1. */
int collective_fake_all_gather(struct collective_group *group, PyObject *fake);
int collective_fake_reduce_scatter(struct collective_group *group, PyObject *fake);
void collective_group_fini(struct collective_group *group);

/* [Note: the end of a process] A thread of gloo that drops the last reference to a tensor while the
 * interpreter ends is ended itself, and the process with it ("terminate called without an active exception").
 * A group that is gone before has no threads any more; so where the script has destroyed its groups, ours may
 * not be the references that keep them until then. Threads of groups that are kept get a moment to drop what
 * they hold.
 *
 * Let go of all groups: collectives raise RuntimeError from now on. What was enqueued and has not ended well
 * may wait for ranks that are dead, and the threads of a group do not come along when a process forks: such a
 * group is kept for ever, because its destructor would wait. 0 or -1. */
int collective_release_groups(void);

/* Each enqueues and returns what must be waited for (a Work object, or Py_None), NULL with an exception on
 * failure. The tensors must stay alive and untouched until collective_wait. Collective over the group. */
PyObject *collective_all_gather(const struct collective_group *group, PyObject *output, PyObject *input);
/* Of tensors in two lists, in one launch where the group can, which is asked first. */
bool collective_can_coalesce(const struct collective_group *group);
PyObject *collective_all_gather_coalesced(const struct collective_group *group, PyObject *outputs,
                                          PyObject *inputs);
PyObject *collective_reduce_scatter(const struct collective_group *group, PyObject *output, PyObject *input);
PyObject *collective_all_reduce(const struct collective_group *group, PyObject *tensor);

/* Wait for `work` and release it: the reference is stolen, also on failure. 0 or -1. */
int collective_wait(PyObject *work);

#endif
