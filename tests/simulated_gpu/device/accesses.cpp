#include "accesses.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <unordered_map>

#include "graph.h"

namespace simulated_gpu {

enum { NOBODY = -1, MOST_REPORTS = 200 };

static cell_map memory_cells;

/* ---- names ---- */

static std::vector<std::string> labels;

static int label_of(const char *what) {
    static std::unordered_map<std::string, int> numbers;
    auto [found, is_new] = numbers.insert({what, (int)labels.size()});
    if (is_new) {
        labels.push_back(what);
    }
    return found->second;
}

static std::map<std::pair<int, int>, int64_t> counts; /* by label and agent */

std::vector<std::pair<std::string, int64_t>> launch_counts() {
    holding lock(device_lock);
    std::vector<std::pair<std::string, int64_t>> all;
    for (auto &[which, count] : counts) {
        all.push_back({labels[(size_t)which.first] + " on " + name_of_agent(which.second), count});
    }
    return all;
}

/* ---- reports ---- */

static std::vector<std::string> reports;
static std::set<std::string> reported;
/* program position of each free, by the text of the report that may follow */
static std::map<std::string, std::string> places;
static std::string (*place)();

void set_place(std::string (*given)()) {
    place = given;
}

std::vector<std::string> take_reports() {
    holding lock(device_lock);
    std::vector<std::string> taken;
    taken.swap(reports);
    reported.clear();
    places.clear();
    return taken;
}

struct conflict {
    const char *kind;
    moment first;
    const char *first_does;
    int agent;
    int label;
    const char *does;
};

static std::string text_of(const conflict &found) {
    return std::string(found.kind) + ": " + labels[(size_t)found.first.label] + " " + found.first_does +
           " on " + name_of_agent(found.first.agent) + ", " + labels[(size_t)found.label] + " " + found.does +
           " on " + name_of_agent(found.agent);
}

static std::string place_now() {
    return place ? place() : "";
}

static void report(const conflict &found, size_t nbytes) {
    std::string text = text_of(found);
    if (reports.size() >= MOST_REPORTS || !reported.insert(text).second) {
        return;
    }
    auto known_place = places.find(text);
    std::string where = known_place != places.end() ? known_place->second : place_now();
    text += " (" + std::to_string(nbytes) + " bytes)\n" + where;
    reports.push_back(text);
    if (setting("SIMULATED_GPU_LOUD", 0)) {
        fprintf(stderr, "simulated_gpu: %s\n", text.c_str());
    }
}

/* ---- cells ---- */

/* Split the cell that contains `at`, so that a cell begins there. */
static void split(cell_map &cells, uintptr_t at) {
    auto next = cells.lower_bound(at);
    if ((next != cells.end() && next->first == at) || next == cells.begin()) {
        return;
    }
    cell &whole = std::prev(next)->second;
    if (whole.end > at) {
        cell rest = whole;
        whole.end = at;
        cells.emplace_hint(next, at, rest);
    }
}

static void forget(cell_map &cells, uintptr_t first, uintptr_t end) {
    split(cells, first);
    split(cells, end);
    cells.erase(cells.lower_bound(first), cells.lower_bound(end));
}

void forget(uintptr_t first, uintptr_t end) {
    forget(memory_cells, first, end);
}

/* ---- the log ---- */

static bool logging;
static clock log_begin;
static std::vector<ordered> order;

void log_order(bool on) {
    holding lock(device_lock);
    logging = on;
    log_begin = host_clock();
    order.clear();
}

std::vector<ordered> order_so_far() {
    holding lock(device_lock);
    return order;
}

static void log_work(const std::string &what, int agent, const clock &now) {
    if (!logging) {
        return;
    }
    ordered entry{what, agent, {}};
    for (int other = HOST + 1; (size_t)other < now.size(); other++) {
        if (known(now, other) > known(log_begin, other)) {
            entry.after.push_back({other, known(now, other) - known(log_begin, other)});
        }
    }
    order.push_back(std::move(entry));
}

void log_alloc(const clock &known_now, int owner) {
    log_work("alloc", owner, known_now);
}

/* ---- launches ---- */

launch::launch(stream *given, const char *what) : on(given), agent(given ? given->agent : HOST) {
    device_lock.lock();
    label = label_of(what);
    if (on) {
        merge(on->now, host_clock());
    }
    time = tick(on ? on->now : host_clock(), agent);
    counts[{label, agent}]++;
    log_work(labels[(size_t)label], agent, on ? on->now : host_clock());
}

launch::~launch() {
    device_lock.unlock();
}

static void add_read(std::vector<moment> &reads, const moment &now) {
    auto same =
        std::find_if(reads.begin(), reads.end(), [&](const moment &one) { return one.agent == now.agent; });
    if (same != reads.end()) {
        *same = now;
    } else {
        reads.push_back(now);
    }
}

void launch::access(const void *memory, size_t nbytes, enum access how) {
    access(memory, nbytes, how, label);
}

void launch::access(const void *memory, size_t nbytes, enum access how, int of_label) {
    static bool watching = setting("SIMULATED_GPU_RACES", 1) != 0;
    if (!nbytes || !memory || !watching) {
        return;
    }
    graph *capturing = on ? graph_of(on->capture) : nullptr;
    if (capturing) {
        capturing->accesses.push_back({memory, nbytes, how, of_label});
    }
    cell_map &cells = capturing ? capturing->cells : memory_cells;
    uintptr_t first = (uintptr_t)memory, end = first + nbytes, covered = first;
    const clock &mine = on ? on->now : host_clock();
    const char *does = how == WRITE ? "writes" : "reads";
    moment now{agent, time, of_label};
    auto is_unordered = [&](const moment &other) {
        return other.agent > HOST && other.agent != agent && other.time > known(mine, other.agent);
    };
    std::vector<std::pair<uintptr_t, uintptr_t>> untouched;
    split(cells, first);
    split(cells, end);
    for (auto at = cells.lower_bound(first); at != cells.end() && at->first < end; ++at) {
        cell &each = at->second;
        if (at->first > covered) {
            untouched.push_back({covered, at->first});
        }
        covered = each.end;
        if (is_unordered(each.write)) {
            report({"race", each.write, "writes", agent, of_label, does}, each.end - at->first);
        }
        for (const moment &read : each.reads) {
            if (how == WRITE && is_unordered(read)) {
                report({"race", read, "reads", agent, of_label, does}, each.end - at->first);
            }
        }
        if (how == READ) {
            add_read(each.reads, now);
        }
    }
    if (how == WRITE) {
        forget(cells, first, end);
        cells[first] = {end, now, {}};
        return;
    }
    if (covered < end) {
        untouched.push_back({covered, end});
    }
    for (auto &[from, to] : untouched) {
        cells[from] = {to, {NOBODY, 0, 0}, {now}};
    }
}

/* ---- freed memory ---- */

struct late_access { /* an access that may be unfinished when its memory is freed */
    conflict found;
    size_t nbytes;
};

static std::vector<late_access> late;

static void add_late(const moment &one, const char *does, int owner, size_t nbytes) {
    late.push_back({{"early free", one, does, owner, label_of("the free"), "gives back"}, nbytes});
    std::string text = text_of(late.back().found);
    if (!places.count(text)) {
        places[text] = place_now();
    }
}

void note_free(uintptr_t first, uintptr_t end, const clock &known_then, int owner) {
    static bool watching = setting("SIMULATED_GPU_FREES", 1) != 0;
    if (!watching) {
        return;
    }
    auto look = [&](const moment &one, const char *does, size_t nbytes) {
        if (one.agent > HOST && one.agent != owner && one.time > known(known_then, one.agent)) {
            add_late(one, does, owner, nbytes);
        }
    };
    for (auto at = memory_cells.lower_bound(first); at != memory_cells.end() && at->first < end; ++at) {
        const cell &each = at->second;
        look(each.write, "writes", each.end - at->first);
        for (const moment &read : each.reads) {
            look(read, "reads", each.end - at->first);
        }
    }
}

void check_frees(const clock &known_now, int owner) {
    std::vector<late_access> others;
    for (const late_access &each : late) {
        if (each.found.agent != owner) {
            others.push_back(each);
        } else if (each.found.first.time > known(known_now, each.found.first.agent)) {
            report(each.found, each.nbytes);
        }
    }
    late.swap(others);
}

} // namespace simulated_gpu
