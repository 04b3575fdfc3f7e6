/* Who is using a unit's parameters. Its table and its only writer are in handle.c. */
#ifndef FSDP_HANDLE_TRAINING_STATE_H
#define FSDP_HANDLE_TRAINING_STATE_H

enum training_state { /* the order of torch's HandleTrainingState */
                      USE_IDLE,
                      USE_FORWARD,
                      USE_BACKWARD_PRE,
                      USE_BACKWARD_POST,
                      USE_SUMMON_FULL_PARAMS,
                      USE_STATES
};

const char *training_state_name(enum training_state state);

#endif
