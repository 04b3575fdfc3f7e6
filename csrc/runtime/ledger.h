/* Where this rank is, in a file that other processes can read and that survives this one, however it ends.
 *
 *   page: rank, step, place (phase and unit) | names of the units, LEDGER_NAME_NBYTES each
 *
 * Invariant: `ledger` is NULL while no file is open, and then an event costs a load and a branch; otherwise a few stores. `place`
 * is one aligned word, so that a reader never sees the phase of one unit with another. */
#ifndef FSDP_RUNTIME_LEDGER_H
#define FSDP_RUNTIME_LEDGER_H

#include <stdint.h>

enum ledger_phase {
    LEDGER_IDLE,
    LEDGER_FORWARD,
    LEDGER_FORWARD_GATHER, /* waits in the all-gather of its forward */
    LEDGER_BACKWARD,
    LEDGER_BACKWARD_GATHER,
    LEDGER_REDUCE, /* waits in the reduction of its gradients */
    LEDGER_SAVE,
    LEDGER_LOAD,
    LEDGER_PHASES
};

enum { LEDGER_NAME_NBYTES = 128, LEDGER_CAPACITY = 4096, LEDGER_HEADER_NBYTES = 4096 };

struct ledger_page {
    char magic[8];
    int64_t rank, world_size, pid, num_names;
    volatile uint64_t step;   /* backwards that this rank has ended */
    volatile uint64_t place;  /* phase << 32 | unit */
    volatile uint64_t failed; /* the place where a collective failed last; 0: none */
    char host[64];
};

extern struct ledger_page *ledger;

/* Open `path` anew, and write what it says to stderr on SIGUSR1 unless that signal is handled already. 0, or -1 with errno. */
int ledger_open(const char *path, int64_t rank, int64_t world_size);
void ledger_close(void);
int32_t ledger_add_name(const char *name); /* the unit's index, or -1 where no ledger is open or it is full */

/* Read another process's file: its page, and the name of the unit at ledger_place(), "" where it has none. 0, -1 with errno, or
 * 1 for a file that is no ledger. */
int ledger_read(const char *path, struct ledger_page *page, char name[LEDGER_NAME_NBYTES]);

/* Where the rank is; between steps, where a collective failed before. */
static inline uint64_t ledger_place(const struct ledger_page *page) {
    return page->place ? page->place : page->failed;
}

/* Returns the place that was left, for ledger_leave. */
static inline uint64_t ledger_enter(int32_t unit, enum ledger_phase phase) {
    if (!ledger)
        return 0;
    uint64_t left = ledger->place;
    ledger->place = (uint64_t)phase << 32 | (uint32_t)unit;
    return left;
}

static inline void ledger_leave(uint64_t place) {
    if (ledger)
        ledger->place = place;
}

static inline void ledger_end_step(void) {
    if (ledger) {
        ledger->step = ledger->step + 1;
        ledger->place = ledger->failed = 0;
    }
}

static inline void ledger_note_failure(void) {
    if (ledger)
        ledger->failed = ledger->place;
}

#endif
