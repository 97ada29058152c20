// A libnvidia-ml.so.1 that knows the driver's release: FAKE_DRIVER_RELEASE, or one that nothing is said against.
#include <cstdio>
#include <cstdlib>

extern "C" {

int nvmlInit_v2() { return 0; }

int nvmlSystemGetDriverVersion(char* version, unsigned length) {
  const char* release = std::getenv("FAKE_DRIVER_RELEASE");
  std::snprintf(version, length, "%s", release != nullptr ? release : "570.124.06");
  return 0;
}

int nvmlShutdown() { return 0; }
}
