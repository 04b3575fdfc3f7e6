/* The adapter to torch.distributed: the only caller of process groups in a step. Collectives are enqueued and
 * waited for by separate functions.
 *
 * A collective calls the method of the ProcessGroup directly, with the options that torch.distributed would
 * pass. If a function of torch.distributed was replaced (by a mock, a logger, a wrapper), the replacement is
 * called instead. */
#ifndef FSDP_COLLECTIVE_COLLECTIVE_H
#define FSDP_COLLECTIVE_COLLECTIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct collective_group {
    PyObject *group;                        /* owned ProcessGroup; NULL without one, or once released */
    PyObject *gather_group, *scatter_group; /* owned; the group, or a fake one of the same rank and size */
    PyObject *all_gather, *reduce_scatter, *all_reduce; /* owned; bound methods of the three groups */
    int64_t world_size;
    int64_t rank;
    struct collective_group *previous, *next; /* borrowed; ring of initialised groups; NULL outside of it */
    pid_t process; /* process that initialised the group; its threads exist only there */
};

/* Find the functions of torch.distributed, so that replacements are recognised later. 0 or -1. */
int collective_init(void);

int collective_group_init(struct collective_group *group, PyObject *process_group); /* 0 or -1 */
/* Route all-gathers or reduce-scatters to the group `fake`, which does not communicate. 0 or -1. */
int collective_fake_all_gather(struct collective_group *group, PyObject *fake);
int collective_fake_reduce_scatter(struct collective_group *group, PyObject *fake);
void collective_group_fini(struct collective_group *group);

/* [Note: the end of a process] A gloo thread that drops the last reference to a tensor during interpreter
 * shutdown is terminated, and the process aborts ("terminate called without an active exception"). A
 * destroyed group has no threads, so our references must not keep groups alive that the script has destroyed.
 * Threads of other groups get a moment to release their tensors.
 *
 * Release all groups; later collectives raise RuntimeError. A group is leaked instead when its destructor
 * would block: an enqueued collective has not completed and may wait for dead ranks, or the group is from
 * before a fork, which does not copy its threads. 0 or -1. */
int collective_release_groups(void);

/* Enqueue a collective. Return its work for collective_wait() (a Work object, or Py_None); NULL with an
 * exception. The tensors must stay alive and unchanged until collective_wait(). Collective over the group. */
PyObject *collective_all_gather(const struct collective_group *group, PyObject *output, PyObject *input);
/* Return true if the group can coalesce the all-gathers of several tensors into one launch. Always false for
 * a replaced all-gather, which must see each call. */
bool collective_can_coalesce(const struct collective_group *group);
PyObject *collective_all_gather_coalesced(const struct collective_group *group, PyObject *outputs,
                                          PyObject *inputs);
PyObject *collective_reduce_scatter(const struct collective_group *group, PyObject *output, PyObject *input);
PyObject *collective_all_reduce(const struct collective_group *group, PyObject *tensor);

/* Wait for `work`, which is stolen even on failure. 0 or -1. */
int collective_wait(PyObject *work);

#endif
