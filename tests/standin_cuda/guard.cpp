// What a CPU build of torch lacks to let autograd and Lightning use the device "cuda": a guard that
// does nothing, the hooks that say there is one GPU, generators that say they are on it, and pinned
// memory, which is the CPU's and known by its addresses.
//
// Load it before torch: torch looks for the hooks once, at the first question about CUDA.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace {

const c10::Device kGpu(c10::DeviceType::CUDA, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kGpu);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kGpu; }
  c10::Device getDevice() const override { return kGpu; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return kStream; }
  c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
  c10::Stream getNewStream(c10::Device, int) const override { return kStream; }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const override { return kStream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// torch refuses it wherever a generator of the CPU is wanted, and the other way round.
struct Generator final : at::CPUGeneratorImpl {
  Generator() { device_ = kGpu; }
};

// Memory of the CPU's allocator, whose addresses it keeps.
struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr made = c10::GetCPUAllocator()->allocate(std::max<size_t>(size, 1));
    void* const start = made.get();
    const auto deleter = made.get_deleter();
    std::lock_guard<std::mutex> held(lock);
    blocks[start] = {size, made.release_context(), deleter};
    return {start, start, &Free, c10::DeviceType::CPU};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }
  bool Holds(const void* place) {
    std::lock_guard<std::mutex> held(lock);
    auto after = blocks.upper_bound(const_cast<void*>(place));
    if (after == blocks.begin()) return false;
    const auto& [start, block] = *std::prev(after);
    return place < static_cast<const char*>(start) + block.size;
  }
  static void Free(void* start);

  struct Block {
    size_t size;
    void* context;
    c10::DeleterFnPtr deleter;
  };
  std::map<void*, Block> blocks;
  std::mutex lock;
};

Pinned& ThePinned() {
  static Pinned* const pinned = new Pinned();  // tensors may outlive what a process ends with
  return *pinned;
}

void Pinned::Free(void* start) {
  Block block;
  {
    std::lock_guard<std::mutex> held(ThePinned().lock);
    block = ThePinned().blocks.extract(start).mapped();
  }
  block.deleter(block.context);
}

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

namespace at {

struct StandinHooks final : CUDAHooksInterface {
  explicit StandinHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  Allocator* getPinnedMemoryAllocator() const override { return &ThePinned(); }
  bool isPinnedPtr(const void* place) const override { return ThePinned().Holds(place); }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return make_generator<::Generator>();
  }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, StandinHooks)

}  // namespace at
