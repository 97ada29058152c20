// One cuMemcpyAsync per plain range, one cuMemcpy2DAsync per rectangle.
#include "paths.h"
#include "rectangles.h"

namespace kvswap::cuda {
namespace {

Memcpy2D strided(const Copy& copy, const Rectangle& rectangle) {
  Memcpy2D made{};
  made.source_device = rectangle.source;
  made.target_device = rectangle.target;
  if (copy.has_alias) {
    made.source_type = made.target_type = kUnified;
  } else if (copy.to_device) {
    made.source_type = kHost, made.target_type = kDevice;
    made.source_host = reinterpret_cast<const void*>(rectangle.source);
  } else {
    made.source_type = kDevice, made.target_type = kHost;
    made.target_host = reinterpret_cast<void*>(rectangle.target);
  }
  made.source_pitch = static_cast<size_t>(rectangle.source_pitch);
  made.target_pitch = static_cast<size_t>(rectangle.target_pitch);
  made.width = static_cast<size_t>(rectangle.width);
  made.height = static_cast<size_t>(rectangle.rows);
  return made;
}

}  // namespace

void copy_by_runs(const Copy& copy) {
  const Driver& driver = copy.driver;
  for (const auto& entry : copy.entries) {
    for_each_rectangle(entry, copy.plan, [&](const Rectangle& rectangle) {
      if (rectangle.rows == 1) {
        const auto nbytes = static_cast<size_t>(rectangle.width);
        check(driver, driver.copy(rectangle.target, rectangle.source, nbytes, copy.stream), "cuMemcpyAsync");
      } else {
        const Memcpy2D made = strided(copy, rectangle);
        check(driver, driver.copy_2d(&made, copy.stream), "cuMemcpy2DAsync");
      }
    });
  }
}

}  // namespace kvswap::cuda
