/* Helpers for the files that use torch: tensors and streams of device type CUDA on streams.h and memory.h. */
#pragma once

#include <c10/core/Stream.h>

#include "accesses.h"
#include "cpu_tensors.h"
#include "memory.h"
#include "timeline.h"

namespace simulated_gpu {

inline c10::Device device_of_index(int index) {
    return {c10::kCUDA, (c10::DeviceIndex)index};
}

stream *stream_of(c10::Stream stream);
c10::Stream torch_stream(stream *which);

/* Record the access to the tensor's bytes, range by range, or as one range if there are many. */
void touch(launch &launch, const at::Tensor &tensor, enum access how);

/* Return the storage for a CPU kernel: on the same memory, or a meta storage if operators run on shapes. */
c10::Storage working_storage_of(const c10::Storage &storage);
double nbytes_of(const at::Tensor &tensor); /* an expanded dimension counts once */

/* Allocate new memory and copy the old bytes, both on the device's current stream. */
void resize_storage(c10::StorageImpl *storage, size_t nbytes);

/* Make the host wait, and warn or raise first as torch.cuda.set_sync_debug_mode demands. */
void wait_as_torch(stream *until);
extern int sync_debug_mode; /* 0: default, 1: warn, 2: error */

/* A generator of the device wraps a CPU generator. */
const at::Generator &default_generator(int device);
at::Generator cpu_generator_in(const at::Generator &generator);

/* While an object lives, the CPU's default generator draws the device's random numbers. */
class drawing_from {
  public:
    explicit drawing_from(int device);
    ~drawing_from();

  private:
    at::Generator of_device, of_cpu;
    at::Tensor kept;
};

} // namespace simulated_gpu
