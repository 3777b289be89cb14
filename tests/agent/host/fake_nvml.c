/* A stand-in for the driver's NVML library. Macros set its answers; the file STATE changes some of them while it is
   loaded, in lines of a key and a number: "ecc0 1" is one uncorrectable error of the first GPU, "used0 0" frees it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned gpu, memory; } utilisation;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_v2;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; MORE } process_v3;
static long state(const char *name, unsigned long h, long usual) {
    char key[64], found[64]; long value;
    FILE *file = fopen(STATE, "r");
    if (!file) return usual;
    snprintf(key, sizeof key, "%s%lu", name, h - 1);
    while (fscanf(file, "%63s %ld", found, &value) == 2) if (!strcmp(key, found)) usual = value;
    fclose(file); return usual; }
static int holders, there = THERE, seen; /* what came back is seen by the first holder alone */
void come_back(void) { there = 2; }
int opened;
int nvmlInit_v2(void) { opened++; if (INIT == 0 && holders++ == 0) seen = there; return INIT; }
int nvmlShutdown(void) { holders--; return 0; }
const char *nvmlErrorString(int code) { (void)code; return "Unknown Error"; }
int nvmlDeviceGetCount_v2(unsigned *n) { while (access(HANG, 0) == 0) usleep(1000); *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(unsigned long)(i + 1); return 0; }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *next) {
    if ((unsigned long)h == 1) return 3;
    *now = *next = MIG; return 0; }
/* Slices 0 and 2 of the second GPU. */
#define SLICE(h) ((unsigned long)h >= 100 ? (int)((unsigned long)h - 100) : -1)
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *n) { (void)h; *n = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned i, void **slice) {
    (void)h; if (SLICES == 0 || (i != 0 && i != 2)) return 6;
    *slice = (void *)(unsigned long)(100 + i); return 0; }
int nvmlDeviceGetComputeMode(void *h, unsigned *m) { *m = (unsigned long)h == 2 ? COMPUTE : 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *h, memory *m) {
    if ((unsigned long)h == 2 && SECOND) return SECOND;
    if (SLICE(h) >= 0) { m->total = (SLICE(h) ? 40ULL : 20ULL) << 30; m->used = 1ULL << 30; return 0; }
    if ((int)(unsigned long)h > seen || (SLICE(h) < 0 && state("lost", (unsigned long)h, 0))) return 15;
    m->total = 80ULL << 30; m->used = (unsigned long long)USED_GIB << 30; return 0; }
int nvmlDeviceGetNumaNodeId(void *h, unsigned *n) { (void)h; *n = 1; return NUMA; }
int nvmlDeviceGetUtilizationRates(void *h, utilisation *u) { u->gpu = 50; return (unsigned long)h >= 2 ? 3 : 0; }
int nvmlDeviceGetUUID(void *h, char *b, unsigned n) {
    if (SLICE(h) >= 0) { snprintf(b, n, "MIG-%d", SLICE(h)); return 0; }
    snprintf(b, n, "GPU-%lu", (unsigned long)h); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b) {
    *a = 9; *b = 0; return (unsigned long)h == 2 ? 3 : 0; }
int nvmlDeviceGetName(void *h, char *b, unsigned n) { /* drivers differ in whether slices have names of their own */
    snprintf(b, n, SLICE(h) == 2 ? "Fake H100 MIG 3g.40gb" : "Fake H100"); return 0; }
#define PROCESSES(version) \
int nvmlDeviceGetComputeRunningProcesses_##version(void *h, unsigned *n, process_##version *p) { \
    if ((unsigned long)h == 2 || (unsigned long)h == 100 || !state("used", (unsigned long)h, 1)) { *n = 0; return 0; } \
    p[0].pid = state("pid", (unsigned long)h, PID); \
    p[0].used = (unsigned long long)state("gib", (unsigned long)h, 1) << 30; p[1].pid = 7; p[1].used = ~0ULL; *n = 2; return 0; } \
int nvmlDeviceGetGraphicsRunningProcesses_##version(void *h, unsigned *n, process_##version *p) { \
    (void)h; (void)p; *n = 0; return 0; }
PROCESSES(v2)
PROCESSES(v3)

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; } pci;
int nvmlDeviceGetPciInfo_v3(void *h, pci *p) {
    snprintf(p->address, sizeof p->address, "00000000:%02lX:00.0", (unsigned long)h * 16); return 0; }
int nvmlDeviceGetTotalEccErrors(void *h, int kind, int counter, unsigned long long *n) {
    (void)counter; *n = state(kind ? "ecc" : "corrected", (unsigned long)h, 0); return (unsigned long)h == 2 ? 3 : 0; }
int nvmlDeviceGetRemappedRows(void *h, unsigned *corrected, unsigned *wrong, unsigned *pending, unsigned *failed) {
    *corrected = *wrong = *pending = 0; *failed = state("remap", (unsigned long)h, 0); return 0; }
typedef struct { unsigned id, scope; long long at, latency; int type, code; union { unsigned n; long long m; } value; } field;
int nvmlDeviceGetFieldValues(void *h, int n, field *f) {
    if (n != 1 || f->id != 230) return 2;
    f->value.n = state("recovery", (unsigned long)h, 0); f->code = 0; return 0; }
/* Events: each XID of the state file is delivered once to each set. */
typedef struct { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event;
typedef struct { int registered[3]; long delivered[3]; } set;
int nvmlEventSetCreate(set **s) { *s = calloc(1, sizeof(set)); return 0; }
int nvmlEventSetFree(set *s) { free(s); return 0; }
int nvmlDeviceRegisterEvents(void *h, unsigned long long types, set *s) {
    if (types != 8) return 2;
    s->registered[(unsigned long)h] = 1; return 0; }
int nvmlEventSetWait_v2(set *s, event *e, unsigned timeout_ms) {
    (void)timeout_ms;
    for (unsigned long h = 1; h <= 2; h++) {
        long xid = state("xid", h, 0);
        if (!s->registered[h] || xid == s->delivered[h]) continue;
        s->delivered[h] = xid; e->device = (void *)h; e->type = 8; e->data = xid; return 0; }
    return 10; }

/* The two GPUs are linked by "nvlinks0" links, and sit in slots of PCIe 5. */
int nvmlDeviceGetP2PStatus(void *a, void *b, int index, int *status) {
    (void)a; (void)b; if (index != 2) return 2;
    *status = state("nvlinks", 1, 0) ? 0 : 1; return 0; }
int nvmlDeviceGetNvLinkState(void *h, unsigned link, unsigned *active) {
    (void)h; *active = link < state("nvlinks", 1, 0); return 0; }
int nvmlDeviceGetNvLinkVersion(void *h, unsigned link, unsigned *version) { (void)h; (void)link; *version = 4; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *h, unsigned *n) { (void)h; *n = 5; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *h, unsigned *n) { (void)h; *n = 16; return 0; }

/* Settings: "cap0 300000" is a power limit in milliwatts, "slow0" has the bits of reasons for lower clocks. */
int nvmlDeviceGetPowerManagementLimit(void *h, unsigned *n) { *n = state("cap", (unsigned long)h, 700000); return 0; }
int nvmlDeviceGetPowerManagementDefaultLimit(void *h, unsigned *n) { (void)h; *n = 700000; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *bits) {
    *bits = state("slow", (unsigned long)h, 1); return 0; }
int nvmlDeviceGetEccMode(void *h, unsigned *now, unsigned *later) {
    *now = *later = state("eccmode", (unsigned long)h, 1); return 0; }
