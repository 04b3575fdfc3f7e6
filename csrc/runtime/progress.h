/* Progress of this rank: number of finished backwards, phase, and unit of the phase. Kept in memory for error
 * messages, SIGUSR1 and torch's debug server.
 *
 * Invariant: phase and unit are one aligned word, so that a signal handler or another thread never reads the
 * phase of one unit with another unit. */
#ifndef FSDP_RUNTIME_PROGRESS_H
#define FSDP_RUNTIME_PROGRESS_H

#include <stddef.h>
#include <stdint.h>

enum progress_phase {
    PROGRESS_IDLE,
    PROGRESS_FORWARD,
    PROGRESS_FORWARD_GATHER, /* waits in the all-gather of a forward */
    PROGRESS_BACKWARD,
    PROGRESS_BACKWARD_GATHER,
    PROGRESS_REDUCE, /* waits in the reduction of gradients */
    PROGRESS_SAVE,
    PROGRESS_LOAD,
    PROGRESS_STATE_DICT,
    PROGRESS_LOAD_STATE_DICT,
    PROGRESS_OPTIM_STATE_DICT,
    PROGRESS_SUMMON,
    PROGRESS_WRAP,
    PROGRESS_PHASES
};

enum { PROGRESS_NAME_NBYTES = 128, PROGRESS_CAPACITY = 4096, PROGRESS_TEXT_NBYTES = 320 };

extern struct progress {
    volatile uint64_t step;  /* number of backwards finished on this rank */
    volatile uint64_t place; /* phase << 32 | index of the unit's name */
} progress;

/* Texts such as "waits in the all-gather of "; the name of a unit follows in phases of a step. */
extern const char *const progress_phases[PROGRESS_PHASES];

/* Return an index for the unit's name, or -1 if PROGRESS_CAPACITY names are in use. */
int32_t progress_add_unit(const char *name);
/* Write "step 3: waits in the all-gather of layers.0". Safe in a signal handler. */
void progress_describe(char text[PROGRESS_TEXT_NBYTES]);
/* Print the description, after "fsdp_c: rank N, ", to stderr on SIGUSR1, unless the process handles that signal
 * already. Returns 1 if it is printed from now on, 0 if not, -1 with errno on failure. */
int progress_print_on_signal(int64_t rank);

/* Enter a phase and return the previous place, for progress_leave. */
static inline uint64_t progress_enter(int32_t unit, enum progress_phase phase) {
    uint64_t previous = progress.place;
    progress.place = (uint64_t)phase << 32 | (uint32_t)unit;
    return previous;
}

static inline void progress_leave(uint64_t place) {
    progress.place = place;
}

static inline void progress_end_step(void) {
    progress.step = progress.step + 1;
    progress.place = 0;
}

#endif
