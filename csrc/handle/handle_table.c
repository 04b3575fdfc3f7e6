/* Live handles by id. The ids are arguments of torch.ops.fsdp_c. */
#include "handle/handle.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    int64_t id;
    struct handle *handle; /* borrowed; the handle removes its entry */
};

/* Sorted by id. The lock is needed because ops run without the GIL. */
static struct {
    pthread_mutex_t lock;
    struct entry *entries; /* owned */
    int64_t count, capacity, last_id;
} table = {.lock = PTHREAD_MUTEX_INITIALIZER};

int64_t handle_table_add(struct handle *handle) {
    int64_t id = -1;
    pthread_mutex_lock(&table.lock);
    if (table.count == table.capacity) {
        int64_t capacity = table.capacity ? table.capacity * 2 : 64;
        struct entry *entries = PyMem_Realloc(table.entries, (size_t)capacity * sizeof *entries);
        if (entries) {
            table.entries = entries;
            table.capacity = capacity;
        }
    }
    if (table.count < table.capacity) {
        id = ++table.last_id;
        table.entries[table.count++] = (struct entry){id, handle};
    }
    pthread_mutex_unlock(&table.lock);
    if (id < 0)
        PyErr_NoMemory();
    return id;
}

static int compare_ids(const void *id, const void *entry) {
    int64_t wanted = *(const int64_t *)id, found = ((const struct entry *)entry)->id;
    return (wanted > found) - (wanted < found);
}

/* Return the entry with this id, or NULL. Borrowed; the caller holds the lock. */
static struct entry *entry_of(int64_t id) {
    return table.count ? bsearch(&id, table.entries, (size_t)table.count, sizeof(struct entry), compare_ids)
                       : NULL;
}

void handle_table_remove(int64_t id) {
    pthread_mutex_lock(&table.lock);
    struct entry *entry = entry_of(id);
    if (entry)
        memmove(entry, entry + 1, (size_t)(&table.entries[--table.count] - entry) * sizeof *entry);
    pthread_mutex_unlock(&table.lock);
}

struct handle *handle_table_find(int64_t id) {
    pthread_mutex_lock(&table.lock);
    const struct entry *entry = entry_of(id);
    struct handle *handle = entry ? entry->handle : NULL;
    pthread_mutex_unlock(&table.lock);
    return handle;
}

int handle_table_refuse_freed_view(const PyObject *tensor) {
    int result = 0; /* no lock: entries are added and removed with the GIL held */
    for (int64_t i = 0; !result && i < table.count; i++)
        result = storage_refuse_freed_view(&table.entries[i].handle->storage, tensor);
    return result;
}
