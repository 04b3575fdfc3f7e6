#define _DEFAULT_SOURCE /* mmap, gethostname and sigaction beside C11 */
#include "runtime/flight_recorder.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct recorder_page *flight_recorder;

static const char MAGIC[8] = {'F', 'S', 'D', 'P', 'C', 'L', 'G', '1'};
enum { RECORDER_NBYTES = RECORDER_HEADER_NBYTES + RECORDER_CAPACITY * RECORDER_NAME_NBYTES };

static char *name_of(struct recorder_page *page, int64_t unit) {
    return (char *)page + RECORDER_HEADER_NBYTES + unit * RECORDER_NAME_NBYTES;
}

static uint64_t magic_number(void) {
    uint64_t number;
    memcpy(&number, MAGIC, sizeof number);
    return number;
}

/* ---- SIGUSR1: nothing here but what a signal handler may call ---- */

static void say(const char *text) {
    size_t length = strlen(text);
    while (length > 0) {
        ssize_t written = write(STDERR_FILENO, text, length);
        if (written <= 0)
            return;
        text += written;
        length -= (size_t)written;
    }
}

static void say_number(uint64_t number) {
    char digits[24];
    char *first = digits + sizeof digits - 1;
    *first = '\0';
    do
        *--first = (char)('0' + number % 10);
    while (number /= 10);
    say(first);
}

static void dump(int signal_number) {
    static const char *const phases[RECORDER_PHASES] = {
        [RECORDER_IDLE] = "is between steps",
        [RECORDER_FORWARD] = "is in the forward of ",
        [RECORDER_FORWARD_GATHER] = "waits in the all-gather of ",
        [RECORDER_BACKWARD] = "is in the backward of ",
        [RECORDER_BACKWARD_GATHER] = "waits in the all-gather for the backward of ",
        [RECORDER_REDUCE] = "waits in the reduction of ",
        [RECORDER_SAVE] = "is saving a checkpoint",
        [RECORDER_LOAD] = "is loading a checkpoint",
        [RECORDER_STATE_DICT] = "is in state_dict()",
        [RECORDER_LOAD_STATE_DICT] = "is in load_state_dict()",
        [RECORDER_OPTIM_STATE_DICT] = "is in optim_state_dict()",
        [RECORDER_SUMMON] = "is in summon_full_params()",
        [RECORDER_WRAP] = "waits for all ranks to wrap with sync_module_states=True",
    };
    int saved_errno = errno;
    struct recorder_page *page = flight_recorder;
    (void)signal_number;
    if (page) {
        uint64_t place = page->place, phase = place >> 32;
        int64_t unit = (int32_t)(uint32_t)place;
        say("fsdp_c: rank ");
        say_number((uint64_t)page->rank);
        say(", step ");
        say_number(page->step);
        say(": ");
        say(phase < RECORDER_PHASES ? phases[phase] : "is somewhere");
        if (phase >= RECORDER_FORWARD && phase <= RECORDER_REDUCE)
            say(unit >= 0 && unit < page->num_names ? name_of(page, unit) : "a unit without a name");
        if (page->saving)
            say(", and is saving a checkpoint in the background");
        say("\n");
    }
    errno = saved_errno;
}

static int dump_on_signal(void) {
    struct sigaction now, wanted;
    if (sigaction(SIGUSR1, NULL, &now) < 0)
        return -1;
    if ((now.sa_flags & SA_SIGINFO) || now.sa_handler != SIG_DFL)
        return 0; /* somebody else's */
    memset(&wanted, 0, sizeof wanted);
    wanted.sa_handler = dump;
    wanted.sa_flags = SA_RESTART;
    sigemptyset(&wanted.sa_mask);
    return sigaction(SIGUSR1, &wanted, NULL);
}

/* ---- the file ---- */

static struct recorder_page *map_file(int descriptor) {
    int failure;
    /* all of it is there from now on: a disk that fills up later must not become a SIGBUS in a step */
    do
        failure = posix_fallocate(descriptor, 0, RECORDER_NBYTES);
    while (failure == EINTR);
    if (failure) {
        errno = failure;
        return NULL;
    }
    void *memory = mmap(NULL, RECORDER_NBYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* A forked child is another process than the one that the file tells of. */
static int close_in_children(void) {
    static bool is_set;
    int failure = is_set ? 0 : pthread_atfork(NULL, NULL, flight_recorder_close);
    is_set = !failure;
    errno = failure;
    return failure ? -1 : 0;
}

static struct recorder_page *map_memory(void) {
    void *memory = mmap(NULL, RECORDER_NBYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static struct recorder_page *map_new_file(const char *path) {
    if (unlink(path) < 0 && errno != ENOENT) /* an earlier process may still have it mapped: not to be cut */
        return NULL;
    int descriptor = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (descriptor < 0)
        return NULL;
    struct recorder_page *page = map_file(descriptor);
    int saved_errno = errno;
    close(descriptor);
    if (!page) {
        unlink(path);
        errno = saved_errno;
    }
    return page;
}

int flight_recorder_open(const char *path, int64_t rank, int64_t world_size) {
    if (close_in_children() < 0)
        return -1;
    struct recorder_page *page = path ? map_new_file(path) : map_memory();
    if (!page)
        return -1;
    page->rank = rank;
    page->world_size = world_size;
    page->pid = getpid();
    gethostname(page->host, sizeof page->host - 1);
    atomic_store_explicit(&page->magic, magic_number(), memory_order_release); /* with all of the above */
    flight_recorder_close();
    flight_recorder = page;
    return path ? dump_on_signal() : 0;
}

/* The signal's handler stays: it does nothing without a file. */
void flight_recorder_close(void) {
    struct recorder_page *page = flight_recorder;
    flight_recorder = NULL;
    if (page)
        munmap(page, RECORDER_NBYTES);
}

int32_t flight_recorder_add_name(const char *name) {
    if (!flight_recorder)
        return -1;
    int64_t unit = flight_recorder->num_names;
    if (unit >= RECORDER_CAPACITY)
        return -1;
    snprintf(name_of(flight_recorder, unit), RECORDER_NAME_NBYTES, "%s", name);
    atomic_store_explicit(&flight_recorder->num_names, unit + 1, memory_order_release); /* with the name */
    return (int32_t)unit;
}

/* ---- reading ---- */

/* What is read after the writer's magic number, or after the count of names, was published before it. */
static ssize_t read_published(int descriptor, void *memory, size_t nbytes, off_t offset) {
    atomic_thread_fence(memory_order_acquire);
    return pread(descriptor, memory, nbytes, offset);
}

static int read_at_unit(int descriptor, struct recorder_page *page, char name[RECORDER_NAME_NBYTES]) {
    ssize_t got = pread(descriptor, page, sizeof *page, 0);
    if (got != (ssize_t)sizeof *page || page->magic != magic_number())
        return got < 0 ? -1 : 1;
    got = read_published(descriptor, page, sizeof *page, 0);
    bool is_possible = page->world_size <= INT32_MAX && page->rank >= 0 && page->rank < page->world_size;
    if (got != (ssize_t)sizeof *page || !is_possible)
        return got < 0 ? -1 : 1;
    int64_t unit = (int32_t)(uint32_t)flight_recorder_place(page);
    if (unit < 0 || unit >= page->num_names || unit >= RECORDER_CAPACITY)
        return 0;
    got = read_published(descriptor, name, RECORDER_NAME_NBYTES - 1,
                         RECORDER_HEADER_NBYTES + unit * RECORDER_NAME_NBYTES);
    return got < 0 ? -1 : 0;
}

static int read_own(struct recorder_page *page, char name[RECORDER_NAME_NBYTES]) {
    errno = ENOENT;
    if (!flight_recorder)
        return -1;
    *page = *flight_recorder;
    int64_t unit = (int32_t)(uint32_t)flight_recorder_place(page);
    if (unit >= 0 && unit < page->num_names)
        memcpy(name, name_of(flight_recorder, unit), RECORDER_NAME_NBYTES - 1);
    return 0;
}

int flight_recorder_read(const char *path, struct recorder_page *page, char name[RECORDER_NAME_NBYTES]) {
    memset(name, 0, RECORDER_NAME_NBYTES);
    if (!path)
        return read_own(page, name);
    /* nobody may write into a FIFO of that name */
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0)
        return -1;
    int result = read_at_unit(descriptor, page, name);
    int saved_errno = errno;
    close(descriptor);
    errno = saved_errno;
    page->host[sizeof page->host - 1] = '\0';
    return result;
}
