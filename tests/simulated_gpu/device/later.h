/* Work that does not run when it is launched.
 *
 *   late        SIMULATED_GPU_LATE=side, default or all: these streams hold launched work and run it only
 *               when something waits for it, as late as a device may. Other streams run their work at once.
 *
 *   captured    A stream in the capture of a graph holds nothing. The graph holds the work and runs it at
 *               each replay.
 *
 * Invariant: a stream runs work in the order of its launches. A wait among them first runs the awaited work.
 * Held work keeps no memory alive: it uses the addresses of its launch, as a device would. */
#pragma once

#include <functional>

#include "streams.h"

namespace simulated_gpu {

using work = std::function<void()>;

enum late_streams { NONE_LATE, SIDE_LATE, DEFAULT_LATE, ALL_LATE };

/* Run all held work, then change the setting. */
DEVICE_API void set_late(enum late_streams which);
DEVICE_API bool is_late(const stream *on);
DEVICE_API bool is_anyone_late();
/* Return true if work launched on the stream now is held, by the stream or by its graph. */
DEVICE_API bool is_later(const stream *on);
DEVICE_API void hold(stream *on, work run);
/* Hold work that runs after the work before `before`. Return the end of the held work, or `before` if a graph
 * holds it. */
DEVICE_API position hold_in_turn(stream *on, work run, position before);
DEVICE_API void run_or_hold(stream *on, const work &run);
/* Run all work of the stream, and of other streams only the work that it waits for. */
DEVICE_API void run_held(stream *on);

/* For the files of this folder. */
struct held_work {
    work run;       /* empty for a wait */
    position until; /* for a wait: the awaited position */
};
position end_of(stream *on);
void run_until(position until);
void hold_wait(stream *on, position until); /* at once, if the stream is not late */
void run_all_held(int device);              /* of all devices if `device` is below 0 */

} // namespace simulated_gpu
