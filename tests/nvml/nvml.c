/* A stand-in for NVIDIA's library libnvidia-ml.so.1, for tests on machines without GPUs.
 *
 * It answers the calls that Freight makes through nvidia-ml-py, from a text file that the variable STAND_IN_CARDS
 * names and that is read anew at every call, so that a test may change the cards while a program looks at them.
 * tests/nvml/cards.py writes the file and tells its form. A process is shown only while it lives, as a real driver
 * does, and so is its memory. With -DOLD it is the library of an old driver, without the newer calls.
 */

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15
};
enum { MOST_CARDS = 64, MOST_PROCESSES = 32, MOST_HANDLES = 256, TEXT = 96 };
#define MIB (1024ULL * 1024ULL)
/* What a driver keeps for itself: part of what is in use by the first version of the call, but not by the second. */
#define RESERVED (300 * MIB)

typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { char uuid[TEXT]; } Handle;

typedef struct {
    char uuid[TEXT], name[TEXT], flags[TEXT];
    unsigned long long total, used;
    int parent; /* The card that an instance is a part of; -1 for a card. */
    unsigned count;
    Process processes[MOST_PROCESSES];
} Card;

typedef struct {
    char driver[TEXT];
    int failure; /* What the call is to return, if the file says so. */
    int count;
    Card cards[MOST_CARDS];
} State;

static int started;
static Handle handles[MOST_HANDLES];
static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER;

static int lives(unsigned pid) {
    char path[64], stat[512];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    size_t size = fread(stat, 1, sizeof stat - 1, file);
    fclose(file);
    stat[size] = 0;
    char *end = strrchr(stat, ')');
    return end && end[1] && end[2] != 'Z' && end[2] != 'X';
}

static void put_process(Card *card, unsigned pid, unsigned long long megabytes) {
    if (card->count == MOST_PROCESSES || !lives(pid)) return;
    card->processes[card->count++] = (Process){pid, megabytes * MIB, ~0u, ~0u};
    card->used += megabytes * MIB;
}

static void read_card(State *state, char **field, int is_instance) {
    if (state->count == MOST_CARDS) return;
    Card *card = &state->cards[state->count];
    memset(card, 0, sizeof *card);
    snprintf(card->uuid, TEXT, "%s", field[1]);
    snprintf(card->name, TEXT, "%s", field[2]);
    card->total = strtoull(field[3], NULL, 10) * MIB;
    card->used = strtoull(field[4], NULL, 10) * MIB;
    snprintf(card->flags, TEXT, "%s", field[5]);
    card->parent = -1;
    if (is_instance)
        for (int n = 0; n < state->count; n++)
            if (state->cards[n].parent < 0) card->parent = n;
    char *rest, *entry = strtok_r(field[6], ",", &rest);
    for (; entry; entry = strtok_r(NULL, ",", &rest)) {
        unsigned pid;
        unsigned long long megabytes;
        if (sscanf(entry, "%u:%llu", &pid, &megabytes) == 2) put_process(card, pid, megabytes);
    }
    state->count++;
}

/* Add the processes that put themselves on cards: a file for each, "<pid>" in the folder "<file>.pids". */
static void read_occupants(State *state, const char *path) {
    char folder[1024], file_path[1400], uuid[TEXT];
    snprintf(folder, sizeof folder, "%s.pids", path);
    DIR *entries = opendir(folder);
    if (!entries) return;
    for (struct dirent *entry = readdir(entries); entry; entry = readdir(entries)) {
        unsigned pid = (unsigned)strtoul(entry->d_name, NULL, 10);
        unsigned long long megabytes;
        snprintf(file_path, sizeof file_path, "%s/%s", folder, entry->d_name);
        FILE *file = pid ? fopen(file_path, "r") : NULL;
        if (!file) continue;
        while (fscanf(file, "%95s %llu", uuid, &megabytes) == 2)
            for (int n = 0; n < state->count; n++)
                if (!strcmp(state->cards[n].uuid, uuid)) put_process(&state->cards[n], pid, megabytes);
        fclose(file);
    }
    closedir(entries);
}

/* Read the file for a call of this name; return what the call is to return at once, or SUCCESS to go on. */
static int read_state(State *state, const char *call) {
    const char *path = getenv("STAND_IN_CARDS");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return DRIVER_NOT_LOADED;
    char line[4096];
    state->count = state->failure = 0;
    state->driver[0] = 0;
    while (fgets(line, sizeof line, file)) {
        char *field[7], *rest = line;
        int fields = 0;
        line[strcspn(line, "\n")] = 0;
        while (fields < 7 && rest) field[fields++] = strsep(&rest, "\t");
        if (!strcmp(field[0], "driver") && fields > 1) snprintf(state->driver, TEXT, "%s", field[1]);
        if (!strcmp(field[0], "fail") && fields > 2 && !strcmp(field[1], call)) state->failure = atoi(field[2]);
        if (!strcmp(field[0], "card") && fields == 7) read_card(state, field, 0);
        if (!strcmp(field[0], "instance") && fields == 7) read_card(state, field, 1);
    }
    fclose(file);
    read_occupants(state, path);
    if (state->failure) return state->failure;
    return started ? SUCCESS : UNINITIALIZED;
}

static int has(const Card *card, const char *flag) { return strstr(card->flags, flag) != NULL; }

/* Return a handle that stays the same for a UUID, whatever becomes of the file. */
static void *handle_of(const char *uuid) {
    Handle *found = NULL;
    pthread_mutex_lock(&handles_lock);
    for (int n = 0; n < MOST_HANDLES && !found; n++) {
        if (!handles[n].uuid[0]) snprintf(handles[n].uuid, TEXT, "%s", uuid);
        if (!strcmp(handles[n].uuid, uuid)) found = &handles[n];
    }
    pthread_mutex_unlock(&handles_lock);
    return found;
}

static int reach(State *state, const char *call, void *handle, Card **card) {
    int result = read_state(state, call);
    if (result) return result;
    for (int n = 0; n < state->count; n++)
        if (!strcmp(state->cards[n].uuid, ((Handle *)handle)->uuid)) {
            *card = &state->cards[n];
            return has(*card, "lost") ? GPU_IS_LOST : SUCCESS;
        }
    return GPU_IS_LOST;
}

/* Begin a call about one card: `state` and `card` are set, or the call has returned. */
#define REACH(handle)                                                  \
    State state;                                                       \
    Card *card = NULL;                                                 \
    int result = reach(&state, __func__, handle, &card);               \
    if (result) return result

/* Begin a call about the whole machine. */
#define READ                                                           \
    State state;                                                       \
    int result = read_state(&state, __func__);                         \
    if (result) return result

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    started = 1;
    READ;
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    started = 0;
    return SUCCESS;
}

const char *nvmlErrorString(int result) {
    static __thread char words[32];
    snprintf(words, sizeof words, "error %d", result);
    return words;
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    READ;
    snprintf(version, length, "%s", state.driver);
    return SUCCESS;
}

static Card *numbered(State *state, unsigned index) {
    for (int n = 0; n < state->count; n++)
        if (state->cards[n].parent < 0 && !index--) return &state->cards[n];
    return NULL;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    READ;
    for (*count = 0; numbered(&state, *count);) ++*count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    READ;
    Card *card = numbered(&state, index);
    if (!card) return INVALID_ARGUMENT;
    if (has(card, "denied")) return NO_PERMISSION;
    if (has(card, "lost")) return GPU_IS_LOST;
    *device = handle_of(card->uuid);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    READ;
    for (int n = 0; n < state.count; n++)
        if (!strcmp(state.cards[n].uuid, uuid)) {
            *device = handle_of(uuid);
            return has(&state.cards[n], "lost") ? GPU_IS_LOST : SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    REACH(device);
    snprintf(name, length, "%s", card->name);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    REACH(device);
    snprintf(uuid, length, "%s", card->uuid);
    return SUCCESS;
}

int nvmlDeviceGetIndex(void *device, unsigned *index) {
    REACH(device);
    for (*index = 0; numbered(&state, *index); ++*index)
        if (numbered(&state, *index) == card) return SUCCESS;
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    REACH(device);
    if (has(card, "nomemory")) return NOT_SUPPORTED;
    *memory = (Memory){card->total, card->total - card->used - RESERVED, card->used + RESERVED};
    return SUCCESS;
}

static int processes_of(Card *card, unsigned *count, Process *processes) {
    if (has(card, "noprocesses")) return NOT_SUPPORTED;
    unsigned room = *count;
    *count = card->count;
    if (room < card->count) return INSUFFICIENT_SIZE;
    if (card->count) memcpy(processes, card->processes, card->count * sizeof *processes);
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned *count, Process *processes) {
    REACH(device);
    return processes_of(card, count, processes);
}

#ifndef OLD

int nvmlDeviceGetMemoryInfo_v2(void *device, MemoryV2 *memory) {
    REACH(device);
    if (has(card, "nomemory")) return NOT_SUPPORTED;
    *memory = (MemoryV2){memory->version, card->total, RESERVED, card->total - card->used - RESERVED, card->used};
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *processes) {
    REACH(device);
    return processes_of(card, count, processes);
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    REACH(device);
    if (has(card, "nomig")) return NOT_SUPPORTED;
    *current = *pending = has(card, "mig");
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    REACH(device);
    *count = has(card, "mig") ? 7 : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **instance) {
    REACH(device);
    for (int n = 0; n < state.count; n++)
        if (state.cards[n].parent == (int)(card - state.cards) && !index--) {
            *instance = handle_of(state.cards[n].uuid);
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *instance, void **device) {
    REACH(instance);
    if (card->parent < 0) return INVALID_ARGUMENT;
    *device = handle_of(state.cards[card->parent].uuid);
    return SUCCESS;
}

#endif
