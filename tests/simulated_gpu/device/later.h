/* Work that does not run when it is launched.
 *
 *   put off    SIMULATED_GPU_LATE=side, default or all: these streams hold what is launched on them, and run
 * it when something waits for it, no sooner: what no wait orders is as late as a device may be. The others
 * run theirs at once captured   a stream of a graph that is being captured holds nothing; the graph does, and
 * runs it at each replay
 *
 * Invariant: a stream runs in the order of its launches, and a wait among them runs first what it waits for.
 * What is held keeps no memory alive: it uses the addresses that it was launched with, as a device would. */
#pragma once

#include <functional>

#include "streams.h"

namespace simulated_gpu {

using work = std::function<void()>;

enum late_streams { NONE_LATE, SIDE_LATE, DEFAULT_LATE, ALL_LATE };

/* Runs all that is held before. */
DEVICE_API void set_late(enum late_streams which);
DEVICE_API bool is_late(const stream *on);
DEVICE_API bool is_anyone_late();
/* Whether work launched on the stream now is held, by it or by its graph. */
DEVICE_API bool is_later(const stream *on);
DEVICE_API void hold(stream *on, work run);
/* The same, after what is held elsewhere. Where the work is held: its end, or `before` if a graph holds
 * it. */
DEVICE_API position hold_in_turn(stream *on, work run, position before);
DEVICE_API void run_or_hold(stream *on, const work &run);
/* All that the stream holds, and what that waits for; nothing of other streams. */
DEVICE_API void run_held(stream *on);

/* For the files of this folder. */
struct held_work {
    work run;       /* empty for a wait */
    position until; /* of a wait */
};
position end_of(stream *on);
void run_until(position until);
void hold_wait(stream *on, position until); /* at once, if the stream is not late */
void run_all_held(int device);              /* of all devices below 0 */

} // namespace simulated_gpu
