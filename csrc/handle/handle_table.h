/* The handles that are alive, by the ids that torch.ops.fsdp_c are called with.
 *
 * Invariant: an id is found from handle_table_add to handle_table_remove, and never given twice. */
#ifndef FSDP_HANDLE_HANDLE_TABLE_H
#define FSDP_HANDLE_HANDLE_TABLE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

struct handle;

int64_t handle_table_add(struct handle *handle); /* its id, from 1 on, or -1 with MemoryError */
void handle_table_remove(int64_t id);            /* a no-op where it is not there */
struct handle *handle_table_find(int64_t id);    /* borrowed, or NULL; without Python's lock as well */

#endif
