// CUDA's threading model on the host, enough to run the kernels in a test.
//
// Each thread of a block is a fiber, which runs until it waits for its warp or its
// block; blocks run one after another, so that shared memory can be static. A barrier
// that not all threads of its group reach is an error, not a hang.

#pragma once

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#define __global__
#define __device__ inline
#define __shared__ static
#define threadIdx (host::running->index)
#define blockIdx (host::block_index)
#define blockDim (host::block_size)
#define gridDim (host::grid_size)

#define __launch_bounds__(...)

using std::isfinite;
using std::max;
using std::min;

struct dim3 {
  unsigned x, y, z;
};

struct alignas(16) float4 {
  float x, y, z, w;
};

struct uint4 {
  unsigned x, y, z, w;
};

namespace host {

constexpr size_t STACK = 1 << 16;
constexpr int WARP = 32;

struct Group {  // of threads that wait for one another
  int size = 0, arrived = 0;
  unsigned generation = 0;
  uint64_t slots[2][WARP] = {};  // written and read by turns
};

struct Fiber {
  dim3 index;
  int place;  // in the block
  Group* group = nullptr;
  unsigned generation = 0;
  bool started = false, done = false;
  ucontext_t start;
  jmp_buf resume;
  std::vector<char> stack;
};

inline dim3 block_index, block_size, grid_size;
inline Fiber* running;
inline Group block;
inline std::vector<Group> warps;
inline std::vector<Fiber> fibers;
inline std::function<void()> body;
inline jmp_buf scheduler;

// Wait until all of the group have arrived.
inline void wait(Group& group) {
  if (++group.arrived == group.size) {
    group.arrived = 0;
    group.generation++;
    return;
  }
  running->group = &group;
  running->generation = group.generation;
  if (!_setjmp(running->resume)) _longjmp(scheduler, 1);
}

// A fiber serves block after block, since making one takes system calls.
inline void enter() {
  for (;;) {
    body();
    running->done = true;
    if (!_setjmp(running->resume)) _longjmp(scheduler, 1);
  }
}

inline void run_fiber(Fiber& fiber) {
  running = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

// Run a block's threads, first to last or last to first. Returns whether all ended.
inline bool run_block(bool backwards) {
  int count = block_size.x * block_size.y * block_size.z, left = count;
  block = Group{count};
  warps.assign((count + WARP - 1) / WARP, Group{});
  if ((int)fibers.size() < count) fibers.resize(count);
  for (int i = 0; i < count; i++) {
    Fiber& fiber = fibers[i];
    warps[i / WARP].size++;
    fiber.place = i;
    fiber.index = {i % block_size.x, i / block_size.x % block_size.y,
                   i / block_size.x / block_size.y};
    fiber.done = false;
    fiber.group = nullptr;
    if (fiber.started) continue;
    fiber.stack.resize(STACK);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = STACK;
    makecontext(&fiber.start, enter, 0);
  }
  for (bool progress = true; left > 0; progress = false) {
    for (int i = 0; i < count; i++) {
      Fiber& fiber = fibers[backwards ? count - 1 - i : i];
      if (fiber.done) continue;
      if (fiber.group && fiber.group->generation == fiber.generation) continue;
      fiber.group = nullptr;
      run_fiber(fiber);
      left -= fiber.done;
      progress = true;
    }
    if (!progress) return false;
  }
  return true;
}

template <typename... A, size_t... I>
int call(void (*kernel)(A...), const unsigned* grid, const unsigned* threads,
         void** arguments, const int* sizes, int count, bool backwards,
         std::index_sequence<I...>) {
  const int expected[] = {(int)sizeof(A)...};
  if (count != sizeof...(A)) return 1;
  if (!std::equal(sizes, sizes + count, expected)) return 2;
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {threads[0], threads[1], threads[2]};
  body = [&] { kernel(*(A*)arguments[I]...); };
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (unsigned x = 0; x < grid[0]; x++) {
        block_index = {x, y, z};
        if (!run_block(backwards)) return 3;
      }
  return 0;
}

template <typename T>
T exchange(T value, int from) {
  Group& warp = warps[running->place / WARP];
  uint64_t* slots = warp.slots[warp.generation % 2];
  memcpy(&slots[running->place % WARP], &value, sizeof(T));
  wait(warp);
  memcpy(&value, &slots[from], sizeof(T));
  return value;
}

}  // namespace host

// A function `launch_NAME` of the kernel NAME: grid, block, pointers to the arguments.
// Returns 0, or 1: their number is wrong, 2: a size is, 3: a barrier was not reached.
#define EXPORT(NAME)                                                                   \
  extern "C" int launch_##NAME(const unsigned* grid, const unsigned* threads,          \
                               void** arguments, const int* sizes, int count,          \
                               bool backwards) {                                       \
    return host::call(NAME, grid, threads, arguments, sizes, count, backwards,         \
                      host::parameters(NAME));                                         \
  }

namespace host {
template <typename... A>
auto parameters(void (*)(A...)) {
  return std::make_index_sequence<sizeof...(A)>();
}
}  // namespace host

inline void __syncthreads() { host::wait(host::block); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return host::exchange(value, host::running->place % host::WARP ^ mask);
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
  host::Group& warp = host::warps[host::running->place / host::WARP];
  uint64_t* slots = warp.slots[warp.generation % 2];
  slots[host::running->place % host::WARP] = predicate;
  host::wait(warp);
  unsigned result = 0;
  for (int i = 0; i < host::WARP; i++) result |= slots[i] << i;
  return result;
}

inline float __fdividef(float x, float y) { return x / y; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline int atomicAdd(int* address, int value) {
  int old = *address;
  *address += value;
  return old;
}

// Types of 16 bits, rounded to nearest, ties to even.

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    uint32_t wide = bits_of(x);
    bits = x != x ? 0x7fc0 : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  }
  explicit operator float() const { return float_of((uint32_t)bits << 16); }
};

struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float x) {
    uint32_t sign = bits_of(x) >> 16 & 0x8000;
    float size = fabsf(x);
    if (x != x) {
      bits = 0x7e00;
    } else if (size >= 65520.0f) {
      bits = sign | 0x7c00;
    } else if (size < 0x1p-14f) {  // below the normal numbers: units of 2^-24
      bits = sign | (uint32_t)nearbyintf(size * 0x1p24f);
    } else {
      uint32_t wide = bits_of(size) - (112u << 23);
      bits = sign | (wide + 0xfff + (wide >> 13 & 1)) >> 13;
    }
  }
  explicit operator float() const {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, size = bits & 0x7fff;
    if (size >= 0x7c00) return float_of(sign | 0x7f800000 | (size & 0x3ff) << 13);
    float value = size < 0x400 ? size * 0x1p-24f : float_of((size << 13) + (112u << 23));
    return float_of(bits_of(value) | sign);
  }
};

// c += a b over a warp, as the manual of PTX shows mma.m16n8k16: the warp's numbers are
// put together to whole matrices. Each lane takes part.
template <typename real>
void host_mma(float* c, const unsigned (&a)[4], unsigned b_0, unsigned b_1) {
  static float left[32][16][16], right[32][16][8];  // of each warp of a block
  auto number = [](unsigned word, int half) {
    uint16_t bits = half ? word >> 16 : word & 0xffff;
    real x;
    memcpy(&x, &bits, 2);
    return (float)x;
  };
  int warp = host::running->place / 32, lane = host::running->place % 32;
  int group = lane >> 2, in_group = lane & 3;
  for (int i = 0; i < 8; i++) {  // the manual's index of a number of a
    int row = group + (i < 2 || (i >= 4 && i < 6) ? 0 : 8);
    int column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
    left[warp][row][column] = number(a[i / 2], i & 1);
  }
  for (int i = 0; i < 4; i++) {
    int row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
    right[warp][row][group] = number(i < 2 ? b_0 : b_1, i & 1);
  }
  host::wait(host::warps[warp]);
  for (int i = 0; i < 4; i++) {
    int row = group + (i < 2 ? 0 : 8), column = in_group * 2 + (i & 1);
    for (int k = 0; k < 16; k++) c[i] += left[warp][row][k] * right[warp][k][column];
  }
  host::wait(host::warps[warp]);
}

// Read four matrices of 8 x 8 numbers of 16 bits, as the manual of PTX shows
// ldmatrix.x4: lanes 8 m to 8 m + 7 give the addresses of the rows of matrix m, and each
// lane takes two neighbours of a row of each matrix, or of its transpose.
template <typename real>
void host_ldmatrix(unsigned (&x)[4], const real* row, bool transposed) {
  static const real* rows[32][32];  // of each warp of a block
  if ((uintptr_t)row % 16) abort();
  int warp = host::running->place / 32, lane = host::running->place % 32;
  rows[warp][lane] = row;
  host::wait(host::warps[warp]);
  for (int m = 0; m < 4; m++) {
    uint16_t bits[2];
    for (int i = 0; i < 2; i++) {
      int down = lane / 4, across = lane % 4 * 2 + i;
      if (transposed) std::swap(down, across);
      memcpy(&bits[i], rows[warp][8 * m + down] + across, 2);
    }
    x[m] = bits[0] | (unsigned)bits[1] << 16;
  }
  host::wait(host::warps[warp]);
}
