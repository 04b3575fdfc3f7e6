/* In which order units run, and which is gathered ahead of its turn (D-110 to D-116).
 *
 * Invariants: `pre` is that of the first iteration and stays; `post` is that of this one. A unit that is in an order knows its place
 * there, and the place is -1 where it is in none. */
#ifndef FSDP_RUNTIME_ORDER_H
#define FSDP_RUNTIME_ORDER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "handle/training_state.h"
#include "runtime/order_check.h"

struct unit;

/* One root's. */
struct order {
    struct unit **pre, **post; /* owned arrays of borrowed pointers */
    int64_t num_pre, num_post;
    int64_t capacity; /* of `post`: a unit can be recorded again */
    int64_t iteration;
    int64_t backward_prefetch_limit, forward_prefetch_limit; /* units that are gathered ahead of the current one */
    struct order_check *check;                               /* owned; NULL unless the order is validated */
};

/* One unit's. */
struct order_place {
    int64_t pre_forward, post_forward;
    bool prefetched; /* gathered ahead, and not used yet */
};

int order_init(struct order *order, int64_t num_units); /* 0, or -1 with MemoryError; order_fini follows in any case */
void order_fini(struct order *order);
void order_set_limits(struct order *order, int64_t backward, int64_t forward);
void order_set_check(struct order *order, struct order_check *check); /* steals it; NULL: not validated */
void order_next_iteration(struct order *order);
void order_forget_forwards(struct order *order); /* of this iteration */

static inline void order_place_init(struct order_place *place) {
    place->pre_forward = place->post_forward = -1;
}

static inline void order_place_set_prefetched(struct order_place *place, bool prefetched) {
    place->prefetched = prefetched;
}

static inline void order_place_end_step(struct order_place *place) {
    place->post_forward = -1;
    place->prefetched = false;
}

int order_record_pre_forward(struct unit *unit); /* and validate, where that was asked for */
int order_record_post_forward(struct unit *unit);
/* The unit to gather ahead while `unit` is in `state`, or NULL. */
struct unit *order_next(const struct unit *unit, enum training_state state);
int order_gather_ahead(struct unit *candidate, enum training_state state); /* unless it is gathered already. 0 or -1 */
int order_prefetch(struct unit *unit, enum training_state state);          /* all of them. 0 or -1 */

#endif
