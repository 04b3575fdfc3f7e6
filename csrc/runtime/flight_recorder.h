/* Where this rank is, in a file that other processes can read and that survives this one, however it ends; or
 * in memory, for a thread of this process that tells the other ranks.
 *
 *   page: rank, step, place (phase and unit) | names of the units, RECORDER_NAME_NBYTES each
 *
 * Invariant: `flight_recorder` is NULL while no record is open, and then an event costs a load and a branch;
 * otherwise a few stores. `place` is one aligned word, so that a reader never sees the phase of one unit with
 * another. */
#ifndef FSDP_RUNTIME_FLIGHT_RECORDER_H
#define FSDP_RUNTIME_FLIGHT_RECORDER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum recorder_phase {
    RECORDER_IDLE,
    RECORDER_FORWARD,
    RECORDER_FORWARD_GATHER, /* waits in the all-gather of its forward */
    RECORDER_BACKWARD,
    RECORDER_BACKWARD_GATHER,
    RECORDER_REDUCE, /* waits in the reduction of its gradients */
    RECORDER_SAVE,
    RECORDER_LOAD,
    RECORDER_STATE_DICT,
    RECORDER_LOAD_STATE_DICT,
    RECORDER_OPTIM_STATE_DICT,
    RECORDER_SUMMON,
    RECORDER_WRAP,
    RECORDER_PHASES
};

enum { RECORDER_NAME_NBYTES = 128, RECORDER_CAPACITY = 4096, RECORDER_HEADER_NBYTES = 4096 };

struct recorder_page {
    _Atomic uint64_t magic; /* published last, when the file is opened */
    int64_t rank, world_size, pid;
    _Atomic int64_t num_names; /* published after each name */
    volatile uint64_t step;    /* backwards that this rank has ended */
    volatile uint64_t place;   /* phase << 32 | unit */
    volatile uint64_t failed;  /* the place where a collective failed last; 0: none */
    char host[64];
    volatile uint64_t events; /* places that were entered: a rank for which it stays the same does not move */
    volatile uint64_t saving; /* 1: a thread beside the training is saving a checkpoint */
};

extern struct recorder_page *flight_recorder;

/* Open `path` anew, and write what it says to stderr on SIGUSR1 unless that signal is handled already. All of
 * the file is allocated at once, and a forked child leaves it. Without a path: a record in memory, and the
 * signal is left alone. 0, or -1 with errno and without a record. */
int flight_recorder_open(const char *path, int64_t rank, int64_t world_size);
void flight_recorder_close(void);
/* the unit's index, or -1 where no file is open or it is full */
int32_t flight_recorder_add_name(const char *name);

/* Read another process's file, or without a path this one's memory: its page, and the name of the unit at
 * flight_recorder_place(), "" where it has none. 0, -1 with errno, or 1 for a file that is no flight record,
 * as one of a rank that cannot be. */
int flight_recorder_read(const char *path, struct recorder_page *page, char name[RECORDER_NAME_NBYTES]);

/* Where the rank is; between steps, where a collective failed before. */
static inline uint64_t flight_recorder_place(const struct recorder_page *page) {
    return page->place ? page->place : page->failed;
}

/* Returns the place that was left, for flight_recorder_leave. */
static inline uint64_t flight_recorder_enter(int32_t unit, enum recorder_phase phase) {
    if (!flight_recorder)
        return 0;
    uint64_t left = flight_recorder->place;
    flight_recorder->place = (uint64_t)phase << 32 | (uint32_t)unit;
    flight_recorder->events = flight_recorder->events + 1;
    return left;
}

static inline void flight_recorder_leave(uint64_t place) {
    if (flight_recorder)
        flight_recorder->place = place;
}

static inline void flight_recorder_end_step(void) {
    if (flight_recorder) {
        flight_recorder->step = flight_recorder->step + 1;
        flight_recorder->place = flight_recorder->failed = 0;
    }
}

static inline void flight_recorder_set_saving(bool saving) {
    if (flight_recorder)
        flight_recorder->saving = saving;
}

static inline void flight_recorder_note_failure(void) {
    if (flight_recorder)
        flight_recorder->failed = flight_recorder->place;
}

#endif
