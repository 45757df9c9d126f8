// What XLA hands to a kernel, without XLA: arrays, threads, and a call through its C interface.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <queue>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

// Threads that take tasks from a queue, as XLA has them.
class Pool {
 public:
  explicit Pool(int count) {
    for (int i = 0; i < count; i++) threads_.emplace_back([this] { work(); });
  }
  ~Pool() {
    for (size_t i = 0; i < threads_.size(); i++) add({});
    for (auto& thread : threads_) thread.join();
  }
  void add(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push(std::move(task));
    some_.notify_one();
  }
  long size() const { return threads_.size(); }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      some_.wait(lock, [this] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop();
      lock.unlock();
      if (!task) return;
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable some_;
  std::queue<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
};

static XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }
static void destroy_error(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }
static Pool* pool_of(XLA_FFI_ExecutionContext* context) { return reinterpret_cast<Pool*>(context); }
static XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  pool_of(args->ctx)->add([task = args->task, data = args->data] { task(data); });
  return nullptr;
}
static XLA_FFI_Error* num_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = pool_of(args->ctx)->size();
  return nullptr;
}

struct Array {
  std::vector<int64_t> dims;
  XLA_FFI_DataType dtype = XLA_FFI_DataType_F32;
  std::vector<float> floats;
  std::vector<int> ints;
  std::vector<uint16_t> halves;
  std::vector<uint8_t> bytes;

  static long count(const std::vector<int64_t>& dims) {
    long n = 1;
    for (auto dim : dims) n *= dim;
    return n;
  }
  static Array zeros(std::vector<int64_t> dims) {
    Array x;
    x.floats.resize(count(dims)), x.dims = dims;
    return x;
  }
  static Array of_ints(std::vector<int64_t> dims) {
    Array x;
    x.ints.resize(count(dims)), x.dims = dims, x.dtype = XLA_FFI_DataType_S32;
    return x;
  }
  static Array of_bytes(std::vector<int64_t> dims) {
    Array x;
    x.bytes.resize(count(dims)), x.dims = dims, x.dtype = XLA_FFI_DataType_PRED;
    return x;
  }
  void* data() {
    return dtype == XLA_FFI_DataType_F32 ? (void*)floats.data()
           : dtype == XLA_FFI_DataType_S32 ? (void*)ints.data()
           : dtype == XLA_FFI_DataType_PRED ? (void*)bytes.data() : (void*)halves.data();
  }
  // Where an array [B|1,N|1,T|1,S|1] has the pair's entry.
  long at(int b, int h, int t, int j) const {
    auto of = [&](int axis, long index) { return dims[axis] > 1 ? index : 0; };
    return ((of(0, b) * dims[1] + of(1, h)) * dims[2] + of(2, t)) * dims[3] + of(3, j);
  }
  // To bfloat16; `floats` keeps what it stands for.
  void shorten() {
    dtype = XLA_FFI_DataType_BF16;
    halves.resize(floats.size());
    for (size_t i = 0; i < floats.size(); i++) {
      uint32_t bits;
      memcpy(&bits, &floats[i], 4);
      halves[i] = bits >> 16, bits &= 0xffff0000;
      memcpy(&floats[i], &bits, 4);
    }
  }
};

static void call(XLA_FFI_Handler* handler, Pool& pool, std::vector<Array*> args, std::vector<Array*> rets,
                 int32_t width, int32_t dropped, bool in_float32) {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Error_Create = create_error, api.XLA_FFI_Error_Destroy = destroy_error;
  api.XLA_FFI_ThreadPool_Schedule = schedule, api.XLA_FFI_ThreadPool_NumThreads = num_threads;
  std::vector<XLA_FFI_Buffer> buffers;
  for (auto* list : {&args, &rets})
    for (Array* x : *list)
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, x->dtype, x->data(), (int64_t)x->dims.size(),
                         x->dims.data()});
  std::vector<void*> pointers;
  for (auto& buffer : buffers) pointers.push_back(&buffer);
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
  XLA_FFI_Scalar scalars[] = {
      {XLA_FFI_DataType_S32, &dropped}, {XLA_FFI_DataType_PRED, &in_float32}, {XLA_FFI_DataType_S32, &width}};
  XLA_FFI_ByteSpan names[] = {{"dropped", 7}, {"in_float32", 10}, {"width", 5}};  // sorted
  XLA_FFI_ByteSpan* name_of[] = {&names[0], &names[1], &names[2]};
  XLA_FFI_AttrType types[] = {XLA_FFI_AttrType_SCALAR, XLA_FFI_AttrType_SCALAR, XLA_FFI_AttrType_SCALAR};
  void* attrs[] = {&scalars[0], &scalars[1], &scalars[2]};
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api, frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(&pool);
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, (int64_t)args.size(), arg_types.data(), pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, (int64_t)rets.size(), ret_types.data(),
                pointers.data() + args.size()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 3, types, name_of, attrs};
  if (XLA_FFI_Error* error = handler(&frame)) printf("%s\n", error->message.c_str()), exit(1);
}
