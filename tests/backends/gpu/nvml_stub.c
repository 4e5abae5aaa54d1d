/* A libnvidia-ml.so.1 without a GPU, for the real pynvml. What it plays stands in the file that NVML_STUB names; the
 * file is read at every call, so that a test can break and repair things while the process runs. One rule a line, the
 * last that fits counts:
 *
 *   cards N                    how many cards there are (1)
 *   mig CARD SLICES            the card is in MIG mode with so many slices
 *   fail FUNCTION CODE [CARD]  the function returns that NVML error; CARD -1: any; slices of a card are that card too
 *   fail-whole FUNCTION CODE   the same for whole cards only, not for their slices
 *   slow FUNCTION MS [CARD]    it takes so long
 *   value FUNCTION N [CARD]    it tells this number instead of the usual one
 *   lost CARD                  every question to the card fails as "GPU is lost" (15)
 *
 * Without NVML_STUB there is no driver (9). Built with -DOLD it lacks what came with later drivers, and with
 * -DMISMATCH opening it fails with 18, as a library does whose driver was replaced.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long u64;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned gpu, memory; } rates_t;
typedef struct { unsigned version; int margin; } margin_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;

#define GIB (1ull << 30)
#define SLICE 0x100

static int card_of(void *handle) { uintptr_t h = (uintptr_t)handle; return h >= SLICE ? (int)((h - SLICE) / 16) : (int)h - 1; }
static int is_slice(void *handle) { return (uintptr_t)handle >= SLICE; }
static int slice_of(void *handle) { return (int)(((uintptr_t)handle - SLICE) % 16); }

static FILE *rules(void) { const char *path = getenv("NVML_STUB"); return path ? fopen(path, "r") : NULL; }

/* The number of the last rule `kind name` that fits the card; `otherwise` if there is none. */
static long long rule(const char *kind, const char *name, int card, long long otherwise) {
  char line[256], k[32], n[96];
  long long number, found = otherwise;
  int of;
  FILE *file = rules();
  if (!file) return otherwise;
  while (fgets(line, sizeof line, file)) {
    of = -1;
    if (sscanf(line, "%31s %95s %lld %d", k, n, &number, &of) >= 3 && !strcmp(k, kind) && !strcmp(n, name) &&
        (of == -1 || of == card))
      found = number;
  }
  fclose(file);
  return found;
}

/* The number of the last rule `kind index number`, or of `kind number` where index is -1. */
static long long fact(const char *kind, int index, long long otherwise) {
  char line[256], k[32];
  long long a, b, found = otherwise;
  FILE *file = rules();
  if (!file) return otherwise;
  while (fgets(line, sizeof line, file)) {
    int got = sscanf(line, "%31s %lld %lld", k, &a, &b);
    if (got >= 2 && !strcmp(k, kind)) {
      if (index == -1) found = a;
      else if (a == index) found = got == 3 ? b : 1;
    }
  }
  fclose(file);
  return found;
}

static int outcome(const char *name, int card, int slice) {
  long long ms = rule("slow", name, card, 0);
  struct timespec wait = {ms / 1000, (ms % 1000) * 1000000};
  FILE *file = rules();
  if (ms) nanosleep(&wait, NULL);
  if (!file) return 9;
  fclose(file);
  if (card >= 0 && fact("lost", card, 0)) return 15;
  if (!slice) {
    int code = (int)rule("fail-whole", name, card, 0);
    if (code) return code;
  }
  return (int)rule("fail", name, card, 0);
}

#define ASK(handle) do { int code = outcome(__func__, card_of(handle), is_slice(handle)); if (code) return code; } while (0)
#define TELL(handle, usual) rule("value", __func__, card_of(handle), usual)
#define NOT_OF_SLICES(handle) do { if (is_slice(handle)) return 3; } while (0)

int nvmlInitWithFlags(unsigned flags) {
#ifdef MISMATCH
  return 18;
#else
  return outcome("nvmlInitWithFlags", -1, 0);
#endif
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "played by the stub"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  int code = outcome(__func__, -1, 0);
  *count = (unsigned)fact("cards", -1, 1);
  return code;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  int code = outcome(__func__, (int)index, 0);
  if (code) return code;
  if (index >= fact("cards", -1, 1)) return 2;
  *handle = (void *)(uintptr_t)(index + 1);
  return 0;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
  ASK(handle);
  if (is_slice(handle)) snprintf(text, size, "MIG-%08d-0000-0000-0000-%012d", card_of(handle), slice_of(handle));
  else snprintf(text, size, "GPU-%08d-0000-0000-0000-000000000000", card_of(handle));
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  int card, slice, code;
  if (sscanf(uuid, "GPU-%8d-0000-0000-0000-%12d", &card, &slice) == 2 && card < fact("cards", -1, 1)) *handle = (void *)(uintptr_t)(card + 1);
  else if (sscanf(uuid, "MIG-%8d-0000-0000-0000-%12d", &card, &slice) == 2 && slice < fact("mig", card, 0)) *handle = (void *)(uintptr_t)(SLICE + card * 16 + slice);
  else return 6;
  code = outcome(__func__, card, is_slice(*handle));
  return code;
}
int nvmlDeviceGetIndex(void *handle, unsigned *index) { ASK(handle); NOT_OF_SLICES(handle); *index = (unsigned)card_of(handle); return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
  ASK(handle);
  snprintf(text, size, is_slice(handle) ? "Stub H100 MIG 1g.10gb" : "Stub H100");
  return 0;
}
int nvmlDeviceGetPciInfo_v3(void *handle, pci_t *pci) {
  ASK(handle);
  memset(pci, 0, sizeof *pci);
  snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", card_of(handle) + 1);
  return 0;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *pending) {
  ASK(handle);
  *now = *pending = fact("mig", card_of(handle), 0) > 0;
  return 0;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **slice) {
  int code = outcome(__func__, card_of(handle), 1);
  if (code) return code;
  if (index >= fact("mig", card_of(handle), 0)) return 6;
  *slice = (void *)(uintptr_t)(SLICE + card_of(handle) * 16 + index);
  return 0;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *slice, void **handle) {
  int code = outcome(__func__, card_of(slice), 0);
  if (code) return code;
  *handle = (void *)(uintptr_t)(card_of(slice) + 1);
  return 0;
}
int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *id) { ASK(handle); *id = 7 + (unsigned)slice_of(handle); return 0; }

int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
  ASK(handle);
  memory->total = is_slice(handle) ? 10 * GIB : 80 * GIB;
  memory->used = (u64)TELL(handle, is_slice(handle) ? 4 * GIB : 60 * GIB);
  memory->free = memory->total - memory->used;
  return 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, rates_t *rates) {
  ASK(handle); NOT_OF_SLICES(handle);
  rates->gpu = (unsigned)TELL(handle, 77);
  rates->memory = 33;
  return 0;
}
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *c) { ASK(handle); NOT_OF_SLICES(handle); *c = (unsigned)TELL(handle, 71); return 0; }
int nvmlDeviceGetTemperatureThreshold(void *handle, int which, unsigned *c) {
  ASK(handle); NOT_OF_SLICES(handle);
  *c = (unsigned)TELL(handle, which == 0 ? 95 : which == 1 ? 92 : 90);
  return 0;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *mw) { ASK(handle); NOT_OF_SLICES(handle); *mw = (unsigned)TELL(handle, 512345); return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *mw) { ASK(handle); NOT_OF_SLICES(handle); *mw = (unsigned)TELL(handle, 700000); return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *handle, u64 *mj) { ASK(handle); NOT_OF_SLICES(handle); *mj = (u64)TELL(handle, 123456789); return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, u64 *bits) { ASK(handle); NOT_OF_SLICES(handle); *bits = (u64)TELL(handle, 0x4); return 0; }

#ifndef OLD
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2_t *memory) {
  ASK(handle);
  memory->total = is_slice(handle) ? 10 * GIB : 80 * GIB;
  memory->reserved = GIB / 2;
  memory->used = (u64)TELL(handle, is_slice(handle) ? 4 * GIB : 60 * GIB);
  memory->free = memory->total - memory->used - memory->reserved;
  return 0;
}
int nvmlDeviceGetMarginTemperature(void *handle, margin_t *margin) { ASK(handle); NOT_OF_SLICES(handle); margin->margin = (int)TELL(handle, 19); return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, u64 *bits) { ASK(handle); NOT_OF_SLICES(handle); *bits = (u64)TELL(handle, 0x4); return 0; }
#endif
