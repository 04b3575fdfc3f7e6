#define _DEFAULT_SOURCE /* sigaction is not in C11 */
/* Progress of this rank: names of phases and units, and the line of SIGUSR1. */
#include "runtime/trace.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

struct progress progress;

const char *const progress_phases[PROGRESS_PHASES] = {
    [PROGRESS_IDLE] = "is between steps",
    [PROGRESS_FORWARD] = "is in the forward of ",
    [PROGRESS_FORWARD_GATHER] = "waits in the all-gather of ",
    [PROGRESS_BACKWARD] = "is in the backward of ",
    [PROGRESS_BACKWARD_GATHER] = "waits in the all-gather for the backward of ",
    [PROGRESS_REDUCE] = "waits in the reduction of ",
    [PROGRESS_SAVE] = "is saving a checkpoint",
    [PROGRESS_LOAD] = "is loading a checkpoint",
    [PROGRESS_STATE_DICT] = "is in state_dict()",
    [PROGRESS_LOAD_STATE_DICT] = "is in load_state_dict()",
    [PROGRESS_OPTIM_STATE_DICT] = "is in optim_state_dict()",
    [PROGRESS_SUMMON] = "is in summon_full_params()",
    [PROGRESS_WRAP] = "waits for all ranks to wrap with sync_module_states=True",
};

static char unit_names[PROGRESS_CAPACITY][PROGRESS_NAME_NBYTES];
static volatile int32_t num_unit_names; /* incremented after the name is complete */
static volatile int64_t signal_rank;

int32_t progress_add_unit(const char *name) {
    if (num_unit_names >= PROGRESS_CAPACITY)
        return -1;
    strncpy(unit_names[num_unit_names], name, PROGRESS_NAME_NBYTES - 1);
    return num_unit_names++;
}

/* ---- async-signal-safe functions only ---- */

static char *append(char *end, const char *text) {
    size_t length = strlen(text);
    memcpy(end, text, length + 1);
    return end + length;
}

static char *append_number(char *end, uint64_t number) {
    char digits[24];
    char *first = digits + sizeof digits - 1;
    *first = '\0';
    do
        *--first = (char)('0' + number % 10);
    while (number /= 10);
    return append(end, first);
}

void progress_describe(char text[PROGRESS_TEXT_NBYTES]) {
    uint64_t place = progress.place, phase = place >> 32;
    int64_t unit = (int32_t)(uint32_t)place;
    char *end = append_number(append(text, "step "), progress.step);
    end = append(append(end, ": "), progress_phases[phase < PROGRESS_PHASES ? phase : PROGRESS_IDLE]);
    if (phase >= PROGRESS_FORWARD && phase <= PROGRESS_REDUCE)
        append(end, unit >= 0 && unit < num_unit_names ? unit_names[unit] : "a unit without a name");
}

static void print_progress(int signal_number) {
    int saved_errno = errno;
    char line[PROGRESS_TEXT_NBYTES + 64];
    char *end = append(append_number(append(line, "fsdp_c: rank "), (uint64_t)signal_rank), ", ");
    (void)signal_number;
    progress_describe(end);
    end = append(end + strlen(end), "\n");
    ssize_t ignored = write(STDERR_FILENO, line, (size_t)(end - line));
    (void)ignored;
    errno = saved_errno;
}

int progress_print_on_signal(int64_t rank) {
    struct sigaction now, wanted;
    if (sigaction(SIGUSR1, NULL, &now) < 0)
        return -1;
    signal_rank = rank;
    if ((now.sa_flags & SA_SIGINFO) || now.sa_handler != SIG_DFL)
        return 0;
    memset(&wanted, 0, sizeof wanted);
    wanted.sa_handler = print_progress;
    wanted.sa_flags = SA_RESTART;
    sigemptyset(&wanted.sa_mask);
    return sigaction(SIGUSR1, &wanted, NULL) < 0 ? -1 : 1;
}
