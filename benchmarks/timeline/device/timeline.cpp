#include "timeline.h"

#include <algorithm>
#include <map>

namespace simulated_gpu {

bool has_only_shapes() {
    static bool set = setting("SIMULATED_GPU_SHAPES", 0) != 0;
    return set;
}

bool is_timed() {
    static bool set = setting("SIMULATED_GPU_TIMELINE", 0) != 0 || has_only_shapes();
    return set;
}

/* ---- costs ---- */

machine_costs &costs() {
    static machine_costs now;
    return now;
}

double *cost_of_name(const std::string &name) {
    machine_costs &now = costs();
    static const std::map<std::string, double *> &by_name = *new std::map<std::string, double *>{
        {"memory", &now.memory},
        {"flops_16", &now.flops_16},
        {"flops_32", &now.flops_32},
        {"product", &now.product},
        {"attention", &now.attention},
        {"least", &now.least},
        {"pcie", &now.pcie},
        {"op", &now.op},
        {"view", &now.view},
        {"launch", &now.launch},
        {"collective", &now.collective},
        {"event", &now.event},
        {"segment", &now.segment},
        {"unit", &now.unit},
        {"gpus_per_node", &now.gpus_per_node},
    };
    auto found = by_name.find(name);
    return found == by_name.end() ? nullptr : found->second;
}

double us_of_bytes(double nbytes) {
    return std::max(costs().least, nbytes / costs().memory);
}

device_use use_of(double us, double nbytes, double us_of_flops) {
    return {nbytes / costs().memory / us, us_of_flops / us};
}

using points = std::vector<std::pair<double, double>>;
struct one_wire {
    std::map<int64_t, points> by_ranks;
    double multiprocessors;
};
static one_wire &wire(enum wire which) {
    static one_wire *all = new one_wire[NUM_WIRES]();
    return all[which];
}

void set_wire(enum wire which, points us_by_nbytes, int64_t ranks, double multiprocessors) {
    holding lock(device_lock);
    std::sort(us_by_nbytes.begin(), us_by_nbytes.end());
    wire(which).by_ranks[ranks] = std::move(us_by_nbytes);
    wire(which).multiprocessors = multiprocessors;
}

double multiprocessors_of(enum wire which) {
    holding lock(device_lock);
    return wire(which).multiprocessors;
}

/* Below the smallest size use its time, above the largest its bandwidth. */
double us_on_wire(enum wire which, int64_t ranks, double nbytes) {
    holding lock(device_lock);
    std::map<int64_t, points> &by_ranks = wire(which).by_ranks;
    const points &known = by_ranks[by_ranks.count(ranks) ? ranks : 0];
    if (known.empty()) {
        return costs().least;
    }
    auto above = std::lower_bound(known.begin(), known.end(), std::pair<double, double>{nbytes, 0});
    if (above == known.begin()) {
        return above->second;
    }
    auto below = std::prev(above);
    if (above == known.end()) {
        return below->second * nbytes / below->first;
    }
    double share = (nbytes - below->first) / (above->first - below->first);
    return below->second + share * (above->second - below->second);
}

/* ---- the run: never destroyed, because threads of the process may outlive its static objects ---- */

static double host;
static std::vector<span> &spans = *new std::vector<span>;
static int64_t last_serial;
static thread_local int num_unpaid, num_in_fsdp;

double host_time() {
    holding lock(device_lock);
    return host;
}

void host_spends(double us) {
    if (is_timed() && !num_unpaid) {
        holding lock(device_lock);
        host += us;
    }
}

unpaid::unpaid() {
    num_unpaid++;
}

unpaid::~unpaid() {
    num_unpaid--;
}

void enter_fsdp() {
    num_in_fsdp++;
}

void leave_fsdp() {
    num_in_fsdp--;
}

bool in_fsdp() {
    return num_in_fsdp > 0;
}

static void add(work_before &to, const work_before &more) {
    for (auto &[stream, serial] : more) {
        int64_t &last = to.try_emplace(stream, serial).first->second;
        last = std::max(last, serial);
    }
}

void device_spends(stream *on, const char *name, enum span_kind kind, double us, device_use use) {
    if (!is_timed() || on->capture) {
        return;
    }
    holding lock(device_lock);
    stream_time &of = on->time;
    double begin = std::max(host, of.ready);
    spans.push_back({begin, begin + us, host, of.ready, of.busy_until, ++last_serial, of.cause, on->id, kind,
                     name, std::move(of.after), use});
    of = {begin + us, begin + us, last_serial, -1};
}

void begins_after(stream *on, const event *until) {
    if (!is_timed() || !until->recorded) {
        return;
    }
    add(on->time.after, until->time.after);
    if (until->time.over > on->time.ready) {
        on->time.ready = until->time.over;
        on->time.cause = until->time.last;
    }
}

event_time end_in_time(const stream *which) {
    event_time end = {which->time.ready, which->time.last, which->time.after};
    add(end.after, {{which->id, which->time.last}});
    return end;
}

void time_record(event *which, stream *on) {
    if (is_timed()) {
        host_spends(costs().event);
        which->time = end_in_time(on);
        which->time.over = std::max(host, which->time.over);
    }
}

void time_wait(stream *which, const event *until) {
    if (is_timed()) {
        host_spends(costs().event);
        begins_after(which, until);
    }
}

/* Keep waits of zero length, too: a replay with contention may lengthen the awaited work. */
void time_host_wait(const event_time &until, const char *what) {
    if (is_timed()) {
        double over = std::max(host, until.over);
        spans.push_back(
            {host, over, host, host, host, ++last_serial, until.last, -1, HOST_WAITS, what, until.after, {}});
        host = over;
    }
}

bool is_over_in_time(const event *which) {
    return is_timed() && which->time.over <= host;
}

bool is_over_in_time(const stream *which) {
    return is_timed() && which->time.ready <= host;
}

std::vector<span> take_spans() {
    holding lock(device_lock);
    std::vector<span> taken;
    taken.swap(spans);
    return taken;
}

} // namespace simulated_gpu
