#include "handle/handle_table.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

struct entry {
    int64_t id;
    struct handle *handle; /* borrowed; removes itself */
};

/* Handles that are alive, by rising id: the table is as large as they ever were at once. The lock is there because ops run
 * without Python's. */
static struct {
    pthread_mutex_t lock;
    struct entry *entries; /* owned */
    int64_t count, capacity, last_id;
} table = {.lock = PTHREAD_MUTEX_INITIALIZER};

static bool grow_table(void) {
    int64_t capacity = table.capacity ? table.capacity * 2 : 64;
    struct entry *entries = PyMem_Realloc(table.entries, (size_t)capacity * sizeof *entries);
    if (!entries)
        return false;
    table.entries = entries;
    table.capacity = capacity;
    return true;
}

int64_t handle_table_add(struct handle *handle) {
    int64_t id = -1;
    pthread_mutex_lock(&table.lock);
    if (table.count < table.capacity || grow_table()) {
        id = ++table.last_id;
        table.entries[table.count++] = (struct entry){id, handle};
    }
    pthread_mutex_unlock(&table.lock);
    if (id < 0)
        PyErr_NoMemory();
    return id;
}

/* The place of `id`, or of the first one above it. */
static int64_t place_of(int64_t id) {
    int64_t low = 0, high = table.count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (table.entries[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool is_at(int64_t place, int64_t id) {
    return place < table.count && table.entries[place].id == id;
}

void handle_table_remove(int64_t id) {
    pthread_mutex_lock(&table.lock);
    int64_t place = place_of(id);
    if (is_at(place, id)) {
        struct entry *entry = &table.entries[place];
        memmove(entry, entry + 1, (size_t)(--table.count - place) * sizeof *entry);
    }
    pthread_mutex_unlock(&table.lock);
}

struct handle *handle_table_find(int64_t id) {
    pthread_mutex_lock(&table.lock);
    int64_t place = place_of(id);
    struct handle *handle = is_at(place, id) ? table.entries[place].handle : NULL;
    pthread_mutex_unlock(&table.lock);
    return handle;
}
