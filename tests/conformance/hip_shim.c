/* The virtual memory calls of the HIP runtime, over mmap and memfd, for a machine without an AMD GPU.
 *
 * Compiled to libamdhip64.so it stands where the runtime stands, below hip-python. It is stricter than any runtime: a call
 * in the wrong order, or with an address or a size that is not exactly right, is refused, and hipShimLastRefusal() says
 * why. Work on a stream is done only when somebody waits for it, so that a missing wait shows as missing data.
 *
 * hipShim* are the test's side door: limits, versions, failures to order, and what is still alive.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_HANDLE = 400,
       NOT_FOUND = 500, NOT_SUPPORTED = 801 };
enum { GRANULARITY = 4096, SLOTS = 4096, ORDERS = 4096 };

typedef struct { int used, fd, references, mappings; size_t size; } Handle;
typedef struct { char *base; size_t size; } Reservation;
typedef struct { char *base; size_t size; Handle *handle; int access; } Mapping;
typedef struct { int used; } Stream;
typedef struct { char *to; const char *from; size_t size; int value; Stream *stream; } Order;
typedef struct { int type, requestedHandleType, locationType, locationId; void *win32; unsigned char compression, rdma;
                 unsigned short usage; } Properties;
typedef struct { int locationType, locationId, flags; } Access;

static Handle handles[SLOTS];
static Reservation reservations[SLOTS];
static Mapping mappings[SLOTS];
static Stream streams[64];
static Order orders[ORDERS];
static int order_count, device_synchronized, initialized, version = 71200000, devices = 2;
static __thread int current_device;
static size_t total = 1ul << 30;
static char refusal[256], failing_call[64];
static int failing_error, failing_after;

#define REFUSE(error, ...) do { snprintf(refusal, sizeof refusal, __VA_ARGS__); return error; } while (0)
#define ENTER() do { \
    if (!initialized) REFUSE(NOT_INITIALIZED, "%s before hipInit", __func__); \
    if (strcmp(failing_call, __func__) == 0 && failing_after-- == 0) { \
        failing_call[0] = 0; \
        REFUSE(failing_error, "%s was ordered to fail", __func__); \
    } } while (0)
#define EACH(item, array) for (__typeof__(&array[0]) item = array; item < array + sizeof array / sizeof array[0]; item++)

static size_t taken(void) {
    size_t sum = 0;
    EACH(h, handles) if (h->used) sum += h->size;
    return sum;
}
static int is_handle(const void *pointer) {
    const Handle *h = pointer;
    return h >= handles && h < handles + SLOTS && h->used;
}
static void drop_if_unused(Handle *h) {
    if (h->references == 0 && h->mappings == 0) { close(h->fd); h->used = 0; }
}
static Mapping *mapping_of(const char *address) {
    EACH(m, mappings) if (m->handle && m->base <= address && address < m->base + m->size) return m;
    return NULL;
}
static Mapping *mapping_ending_at(const char *address) {
    EACH(m, mappings) if (m->handle && m->base + m->size == address) return m;
    return NULL;
}
static Reservation *reservation_of(const char *address, size_t size) {
    EACH(r, reservations) if (r->base && r->base <= address && address + size <= r->base + r->size) return r;
    return NULL;
}
static int accessible(const char *address, size_t size) {
    for (const char *p = address; p < address + size;) {
        Mapping *m = mapping_of(p);
        if (!m || !m->access) return 0;
        p = m->base + m->size;
    }
    return 1;
}
static int is_stream(const Stream *s) { return s == NULL || (s >= streams && s < streams + 64 && s->used); }
static void work_off(Stream *stream, int all) {
    int kept = 0;
    for (int i = 0; i < order_count; i++) {
        Order *o = &orders[i];
        if (!all && o->stream != stream) orders[kept++] = *o;
        else if (o->from) memcpy(o->to, o->from, o->size);
        else memset(o->to, o->value, o->size);
    }
    order_count = kept;
}
static int is_wanted(const Properties *p) {
    return p->type == 1 && p->locationType == 1 && p->locationId >= 0 && p->locationId < devices && !p->win32
        && (p->requestedHandleType == 0 || p->requestedHandleType == 1);
}

int hipInit(unsigned flags) { if (flags) return INVALID_VALUE; initialized = 1; return OK; }
int hipRuntimeGetVersion(int *out) { *out = version; return OK; }
int hipGetDevice(int *out) { ENTER(); *out = current_device; return OK; }
int hipSetDevice(int device) {
    ENTER();
    if (device < 0 || device >= devices) REFUSE(INVALID_DEVICE, "hipSetDevice: no device %d", device);
    current_device = device;
    return OK;
}
int hipDeviceGetAttribute(int *out, int attribute, int device) {
    ENTER();
    (void)attribute;
    if (device < 0 || device >= devices) REFUSE(INVALID_DEVICE, "hipDeviceGetAttribute: no device %d", device);
    *out = 1;
    return OK;
}
int hipMemGetInfo(size_t *free_, size_t *total_) { ENTER(); *total_ = total; *free_ = total - taken(); return OK; }
int hipMemGetAllocationGranularity(size_t *out, const Properties *p, int option) {
    ENTER();
    if (!is_wanted(p) || option != 0) REFUSE(INVALID_VALUE, "granularity asked for other properties");
    *out = GRANULARITY;
    return OK;
}

int hipMemAddressReserve(void **out, size_t size, size_t alignment, void *hint, unsigned long long flags) {
    ENTER();
    if (!size || size % GRANULARITY || alignment & (alignment - 1) || hint || flags)
        REFUSE(INVALID_VALUE, "hipMemAddressReserve(%zu, %zu)", size, alignment);
    EACH(r, reservations) {
        if (r->base) continue;
        char *start = mmap(NULL, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start == MAP_FAILED) return OUT_OF_MEMORY;
        char *base = (char *)(((uintptr_t)start + alignment - 1) / alignment * alignment);
        if (base > start) munmap(start, base - start);
        munmap(base + size, start + alignment - base);
        *r = (Reservation){base, size};
        *out = base;
        return OK;
    }
    return OUT_OF_MEMORY;
}
int hipMemAddressFree(void *address, size_t size) {
    ENTER();
    EACH(m, mappings)
        if (m->handle && m->base >= (char *)address && m->base < (char *)address + size)
            REFUSE(INVALID_VALUE, "hipMemAddressFree with a mapping inside");
    EACH(r, reservations) if (r->base == address && r->size == size) {
        munmap(address, size);
        r->base = NULL;
        return OK;
    }
    REFUSE(INVALID_VALUE, "hipMemAddressFree of what is no whole reservation");
}

int hipMemCreate(void **out, size_t size, const Properties *p, unsigned long long flags) {
    ENTER();
    if (!size || size % GRANULARITY || flags || !is_wanted(p)) REFUSE(INVALID_VALUE, "hipMemCreate(%zu)", size);
    if (size > total - taken()) return OUT_OF_MEMORY;
    EACH(h, handles) {
        if (h->used) continue;
        int fd = memfd_create("hip-shim", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, size)) return OUT_OF_MEMORY;
        *h = (Handle){1, fd, 1, 0, size};
        *out = h;
        return OK;
    }
    return OUT_OF_MEMORY;
}
int hipMemRelease(void *handle) {
    ENTER();
    Handle *h = handle;
    if (!is_handle(h) || h->references < 1) REFUSE(INVALID_VALUE, "hipMemRelease of no handle");
    h->references--;
    drop_if_unused(h);
    return OK;
}
int hipMemRetainAllocationHandle(void **out, void *address) {
    ENTER();
    Mapping *m = mapping_of(address);
    if (!m) return INVALID_VALUE;
    m->handle->references++;
    *out = m->handle;
    return OK;
}
int hipMemExportToShareableHandle(int *out, void *handle, int type, unsigned long long flags) {
    ENTER();
    if (!is_handle(handle) || type != 1 || flags) REFUSE(INVALID_VALUE, "hipMemExportToShareableHandle");
    *out = dup(((Handle *)handle)->fd);
    return *out < 0 ? OUT_OF_MEMORY : OK;
}
int hipMemMap(void *address, size_t size, size_t offset, void *handle, unsigned long long flags) {
    ENTER();
    Handle *h = handle;
    if (!is_handle(h) || h->size != size || offset || flags) REFUSE(INVALID_VALUE, "hipMemMap of a part, or of no handle");
    if ((uintptr_t)address % GRANULARITY || !reservation_of(address, size)) REFUSE(INVALID_VALUE, "hipMemMap outside");
    EACH(m, mappings)
        if (m->handle && m->base < (char *)address + size && (char *)address < m->base + m->size)
            REFUSE(INVALID_VALUE, "hipMemMap over another mapping");
    EACH(m, mappings) {
        if (m->handle) continue;
        if (mmap(address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, h->fd, 0) == MAP_FAILED) return OUT_OF_MEMORY;
        *m = (Mapping){address, size, h, 0};
        h->mappings++;
        device_synchronized = 0;
        return OK;
    }
    return OUT_OF_MEMORY;
}
/* Only for a whole run of neighbouring mappings, not for a part of one. */
int hipMemSetAccess(void *address, size_t size, const Access *access, size_t count) {
    ENTER();
    if (count != 1 || access->locationType != 1 || access->locationId != current_device || access->flags != 3)
        REFUSE(INVALID_VALUE, "hipMemSetAccess for somebody else than the device");
    Reservation *r = reservation_of(address, size);
    if (!r) REFUSE(INVALID_VALUE, "hipMemSetAccess outside a reservation");
    char *start = address, *end = start + size, *p = start;
    while (p < end) {
        Mapping *m = mapping_of(p);
        if (!m || m->base != p) REFUSE(INVALID_VALUE, "hipMemSetAccess over a hole or a part of a mapping");
        p += m->size;
    }
    if (p != end) REFUSE(INVALID_VALUE, "hipMemSetAccess ends inside a mapping");
    if ((start > r->base && mapping_ending_at(start)) || (end < r->base + r->size && mapping_of(end)))
        REFUSE(INVALID_VALUE, "hipMemSetAccess for a part of a run");
    if (version < 71200000)
        for (p = start; p < end; p += mapping_of(p)->size)
            if (mapping_of(p)->size != mapping_of(start)->size)
                REFUSE(INVALID_VALUE, "hipMemSetAccess over chunks of several sizes");
    if (mprotect(address, size, PROT_READ | PROT_WRITE)) return INVALID_VALUE;
    for (p = start; p < end; p += mapping_of(p)->size) mapping_of(p)->access = 1;
    return OK;
}
int hipMemUnmap(void *address, size_t size) {
    ENTER();
    Mapping *m = mapping_of(address);
    if (!m || m->base != address || m->size != size) REFUSE(INVALID_VALUE, "hipMemUnmap of what is no whole mapping");
    if (m->access && (order_count || !device_synchronized)) REFUSE(INVALID_VALUE, "hipMemUnmap of memory in use");
    mmap(address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    m->handle->mappings--;
    drop_if_unused(m->handle);
    m->handle = NULL;
    return OK;
}
int hipMemGetAddressRange(void **base, size_t *size, void *address) {
    ENTER();
    Mapping *m = mapping_of(address);
    if (!m) return NOT_FOUND;
    *base = m->base;
    *size = m->size;
    return OK;
}

int hipStreamCreateWithFlags(Stream **out, unsigned flags) {
    ENTER();
    if (flags != 1) REFUSE(INVALID_VALUE, "a stream that waits for the null stream");
    EACH(s, streams) if (!s->used) { s->used = 1; *out = s; return OK; }
    return OUT_OF_MEMORY;
}
int hipStreamDestroy(Stream *s) {
    ENTER();
    if (!s || !is_stream(s)) REFUSE(INVALID_HANDLE, "hipStreamDestroy of no stream");
    work_off(s, 0);
    s->used = 0;
    return OK;
}
static int enqueue(Order order) {
    device_synchronized = 0;
    if (order_count == ORDERS) work_off(NULL, 1);
    orders[order_count++] = order;
    return OK;
}
int hipMemsetD8Async(void *to, unsigned char value, size_t size, Stream *stream) {
    ENTER();
    if (!is_stream(stream) || !size || !accessible(to, size)) REFUSE(INVALID_VALUE, "hipMemsetD8Async of memory without access");
    return enqueue((Order){to, NULL, size, value, stream});
}
int hipMemcpyDtoDAsync(void *to, void *from, size_t size, Stream *stream) {
    ENTER();
    if (!is_stream(stream) || !size || !accessible(to, size) || !accessible(from, size))
        REFUSE(INVALID_VALUE, "hipMemcpyDtoDAsync of memory without access");
    return enqueue((Order){to, from, size, 0, stream});
}
int hipStreamSynchronize(Stream *stream) {
    ENTER();
    if (!is_stream(stream)) REFUSE(INVALID_HANDLE, "hipStreamSynchronize of no stream");
    work_off(stream, 0);
    return OK;
}
int hipDeviceSynchronize(void) { ENTER(); work_off(NULL, 1); device_synchronized = 1; return OK; }

void hipShimSetVersion(int value) { version = value; }
void hipShimSetTotal(size_t value) { total = value; }
void hipShimFail(const char *call, int error, int after) {
    snprintf(failing_call, sizeof failing_call, "%s", call);
    failing_error = error;
    failing_after = after;
}
const char *hipShimLastRefusal(void) { return refusal; }
/* Reservations, mappings, handles and streams that are alive, in one number each. */
void hipShimAlive(int out[4]) {
    memset(out, 0, 4 * sizeof(int));
    EACH(r, reservations) out[0] += r->base != NULL;
    EACH(m, mappings) out[1] += m->handle != NULL;
    EACH(h, handles) out[2] += h->used;
    EACH(s, streams) out[3] += s->used;
}
