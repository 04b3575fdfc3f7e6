/* What the files on torch's side share: tensors and streams of device type CUDA, seen as those of streams.h
 * and memory.h. */
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

/* The tensor's bytes, range by range where these are few. */
void touch(launch &launch, const at::Tensor &tensor, enum access how);

/* For the operators: that of the CPU, or one without memory where nothing is computed. */
c10::Storage working_storage_of(const c10::Storage &storage);
double nbytes_of(const at::Tensor &tensor); /* that it moves: what is expanded counts once */

/* Fresh memory, on the current stream of the device; what was there is copied on that stream. */
void resize_storage(c10::StorageImpl *storage, size_t nbytes);

/* As what torch does when the host has to wait: torch.cuda.set_sync_debug_mode has its say first. */
void wait_as_torch(stream *until);
extern int sync_debug_mode; /* 0: default, 1: warn, 2: error */

/* Random numbers of a device come from a generator of the CPU inside that of the device. */
const at::Generator &default_generator(int device);
at::Generator cpu_generator_in(const at::Generator &generator);

/* While it lives, what the CPU draws without being given a generator are the numbers of a device. */
class drawing_from {
  public:
    explicit drawing_from(int device);
    ~drawing_from();

  private:
    at::Generator of_device, of_cpu;
    at::Tensor kept;
};

} // namespace simulated_gpu
