// Scans events of PyTorch's profiler, a JSON list of objects, into columns of integers.
//
// A scan returns what `tabulate` in kineto_events.py makes of the decoded events, or a negative number:
// for text that is not JSON to the letter, values of an unusual type or size, and pairs of beginnings
// and ends. Then the caller decodes the list. No byte outside of the text is read.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

enum { UNSUPPORTED = -2, NO_MEMORY = -4 };
enum { MAX_DEPTH = 32, MAX_DIGITS = 18, DECIMALS = 3 };

// Columns of a row, in the order of COLUMNS in kineto_events.py.
enum column {
    CAT, NAME, PID, TID,  // Numbers of tokens.
    START, DURATION,      // Nanoseconds.
    DEVICE, STREAM, CORRELATION, BYTES, SOURCE, DESTINATION, SEQUENCE, FORWARD,
    FLAGS, ARGS_BEGIN, ARGS_END,  // Bytes of the text; both 0 where there are no arguments.
    COLUMNS
};
enum { HAS_GROUP = 1, HAS_ELEMENT = 2 };

static const int64_t UNKNOWN = -1, NO_NAME = -2;
static const int64_t LARGEST_US = 9000000000000000;  // As nanoseconds it fits into 64 bits.
static const int64_t POWERS[] = {1, 10, 100, 1000};

// A distinct text: a string with its quotes, or a number.
struct token {
    int64_t begin, end;
};

struct slot {
    uint32_t hash;
    int32_t number;  // Of a token, counted from 1; 0 in an empty slot.
};

struct scan {
    const uint8_t *text, *at, *end;
    int64_t *rows;  // One column after another.
    int64_t capacity;
    struct token *tokens;
    int64_t token_count, token_capacity;
    struct slot *slots;
    uint64_t mask;
    int64_t row[COLUMNS];
};

struct key {
    const char *name;
    int32_t length, action;
};

enum action { PH, TOKEN, TEXT_TOKEN, TIME, ARGS, INTEGER, GROUP, ELEMENT, SCALAR };

#define KEY(name, action, column) {name, sizeof name - 1, (action) | (column) << 8}

static const struct key EVENT_KEYS[] = {
    KEY("ph", PH, 0),           KEY("cat", TEXT_TOKEN, CAT), KEY("name", TOKEN, NAME),
    KEY("pid", TOKEN, PID),     KEY("tid", TOKEN, TID),      KEY("ts", TIME, START),
    KEY("dur", TIME, DURATION),   KEY("args", ARGS, 0),
};

static const struct key ARGS_KEYS[] = {
    KEY("device", INTEGER, DEVICE),
    KEY("stream", INTEGER, STREAM),
    KEY("correlation", INTEGER, CORRELATION),
    KEY("bytes", INTEGER, BYTES),
    KEY("fromDevice", INTEGER, SOURCE),
    KEY("toDevice", INTEGER, DESTINATION),
    KEY("Sequence number", INTEGER, SEQUENCE),
    KEY("Fwd thread id", INTEGER, FORWARD),
    KEY("Process Group Name", GROUP, 0),
    KEY("dtype", ELEMENT, 0),
    KEY("In msg nelems", SCALAR, 0),
    KEY("Out msg nelems", SCALAR, 0),
    KEY("Process Group Description", SCALAR, 0),
    KEY("Group size", SCALAR, 0),
    KEY("Global rank start", SCALAR, 0),
    KEY("Global rank stride", SCALAR, 0),
    KEY("Collective name", SCALAR, 0),
    KEY("Src Rank", SCALAR, 0),
    KEY("Dst Rank", SCALAR, 0),
};

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

static inline void skip_space(struct scan *s) {
    while (s->at < s->end && (*s->at == ' ' || *s->at == '\n' || *s->at == '\r' || *s->at == '\t'))
        s->at++;
}

// The next byte after any spaces, or 0 at the end.
static inline int peek(struct scan *s) {
    skip_space(s);
    return s->at < s->end ? *s->at : 0;
}

static inline int accept(struct scan *s, int byte) {
    if (peek(s) != byte) return 0;
    s->at++;
    return 1;
}

enum escapes { NONE, SIMPLE, UNICODE, BAD };

// Skips a string, from its first quote on; returns which escapes it has.
static enum escapes skip_string(struct scan *s) {
    enum escapes escapes = NONE;
    const uint8_t *at = s->at + 1, *end = s->end;
    const uint64_t ones = 0x0101010101010101u, highs = 0x8080808080808080u;
    for (;;) {
        while (end - at >= 8) {  // Eight bytes without a quote, a backslash or a control character.
            uint64_t word, quote, slash;
            memcpy(&word, at, sizeof word);
            quote = word ^ ones * '"', slash = word ^ ones * '\\';
            uint64_t special = ((quote - ones) & ~quote) | ((slash - ones) & ~slash) |
                               ((word - ones * 0x20) & ~word);
            if (special & highs) break;
            at += 8;
        }
        if (at >= end || *at < 0x20) return BAD;
        if (*at == '"') break;
        if (*at++ != '\\') continue;
        if (at >= end) return BAD;
        if (*at == 'u') escapes = UNICODE;
        else if (!strchr("\"\\/bfnrt", *at) || !*at) return BAD;
        else if (escapes == NONE) escapes = SIMPLE;
        at++;
    }
    s->at = at + 1;
    return escapes;
}

static inline int is_digit(const struct scan *s) {
    return s->at < s->end && *s->at >= '0' && *s->at <= '9';
}

struct number {
    const uint8_t *begin, *point;  // An integer has no point: NULL.
    int has_exponent;
};

static int skip_number(struct scan *s, struct number *number) {
    *number = (struct number){.begin = s->at};
    if (s->at < s->end && *s->at == '-') s->at++;
    if (!is_digit(s)) return 0;
    if (*s->at++ == '0' && is_digit(s)) return 0;
    while (is_digit(s)) s->at++;
    if (s->at < s->end && *s->at == '.') {
        number->point = s->at++;
        if (!is_digit(s)) return 0;
        while (is_digit(s)) s->at++;
    }
    if (s->at < s->end && (*s->at | 0x20) == 'e') {
        number->has_exponent = 1;
        s->at++;
        if (s->at < s->end && (*s->at == '+' || *s->at == '-')) s->at++;
        if (!is_digit(s)) return 0;
        while (is_digit(s)) s->at++;
    }
    return 1;
}

static int skip_word(struct scan *s, const char *word) {
    int64_t length = (int64_t)strlen(word);
    if (s->end - s->at < length || memcmp(s->at, word, (size_t)length)) return 0;
    s->at += length;
    return 1;
}

static int skip_value(struct scan *s, int depth);

// Skips the key of an object's next member and the colon; sets `key` to its text without quotes.
static int skip_key(struct scan *s, const uint8_t **key, int64_t *length) {
    if (peek(s) != '"') return 0;
    *key = s->at + 1;
    if (skip_string(s) != NONE) return 0;
    *length = s->at - 1 - *key;
    return accept(s, ':');
}

static int skip_value(struct scan *s, int depth) {
    struct number number;
    const uint8_t *key;
    int64_t length;
    int byte = peek(s);
    switch (byte) {
    case '"':
        return skip_string(s) <= SIMPLE;
    case 't':
        return skip_word(s, "true");
    case 'f':
        return skip_word(s, "false");
    case 'n':
        return skip_word(s, "null");
    case '[':
    case '{':
        if (depth >= MAX_DEPTH) return 0;
        s->at++;
        if (accept(s, byte + 2)) return 1;  // As ']' and '}' follow in ASCII.
        do {
            if (byte == '{' && !skip_key(s, &key, &length)) return 0;
            if (!skip_value(s, depth + 1)) return 0;
        } while (accept(s, ','));
        return accept(s, byte + 2);
    default:
        return skip_number(s, &number);
    }
}

static uint32_t hash_text(const uint8_t *at, int64_t length) {
    const uint64_t factor = 0x9e3779b97f4a7c15u;
    uint64_t hash = (uint64_t)length * factor, word = 0;
    for (; length >= 8; at += 8, length -= 8) {
        memcpy(&word, at, 8);
        hash = (hash ^ word) * factor;
        hash ^= hash >> 29;
    }
    word = 0;
    memcpy(&word, at, (size_t)length);
    hash = (hash ^ word) * factor;
    return (uint32_t)(hash >> 32);
}

// The number of the token from `begin` to the scan's position, which is added if it is new; -1 where
// there is no room for it.
static int64_t intern_token(struct scan *s, const uint8_t *begin) {
    int64_t length = s->at - begin;
    uint32_t hash = hash_text(begin, length);
    for (uint64_t place = hash & s->mask;; place = (place + 1) & s->mask) {
        struct slot *slot = &s->slots[place];
        if (!slot->number) {
            if (s->token_count >= s->token_capacity) return -1;
            s->tokens[s->token_count] = (struct token){begin - s->text, s->at - s->text};
            *slot = (struct slot){hash, (int32_t)++s->token_count};
            return s->token_count - 1;
        }
        struct token *token = &s->tokens[slot->number - 1];
        if (slot->hash == hash && token->end - token->begin == length &&
            !memcmp(s->text + token->begin, begin, (size_t)length))
            return slot->number - 1;
    }
}

static int read_token(struct scan *s, int64_t *number, int text_only) {
    int byte = peek(s);
    struct number numeral;
    const uint8_t *begin = s->at;
    if (byte == '"') {
        if (skip_string(s) == BAD) return 0;
    } else if (byte == 'n') {
        if (!skip_word(s, "null")) return 0;
    } else if (text_only || !skip_number(s, &numeral)) {
        return 0;
    }
    *number = intern_token(s, begin);
    return *number >= 0;
}

static int read_digits(const uint8_t *at, const uint8_t *end, int64_t *number) {
    if (end - at > MAX_DIGITS) return 0;
    *number = 0;
    for (; at < end; at++) *number = *number * 10 + (*at - '0');
    return 1;
}

static int read_integer(struct scan *s, int64_t *number) {
    struct number numeral;
    peek(s);
    if (!skip_number(s, &numeral) || numeral.point || numeral.has_exponent) return 0;
    int is_negative = *numeral.begin == '-';
    if (!read_digits(numeral.begin + is_negative, s->at, number)) return 0;
    if (is_negative) *number = -*number;
    return 1;
}

// Reads microseconds as nanoseconds; half a nanosecond is rounded to the even one.
static int read_time(struct scan *s, int64_t *time) {
    struct number numeral;
    peek(s);
    if (!skip_number(s, &numeral) || numeral.has_exponent) return 0;
    int is_negative = *numeral.begin == '-';
    const uint8_t *point = numeral.point ? numeral.point : s->at;
    int64_t whole, part = 0;
    if (!read_digits(numeral.begin + is_negative, point, &whole) || whole > LARGEST_US) return 0;
    *time = whole * POWERS[DECIMALS];
    if (numeral.point) {
        const uint8_t *first = point + 1, *rest = first + DECIMALS < s->at ? first + DECIMALS : s->at;
        if (!read_digits(first, rest, &part)) return 0;
        *time += part * POWERS[DECIMALS - (rest - first)];
        if (rest < s->at) {
            int is_up = *rest > '5';
            if (*rest == '5') {
                const uint8_t *more = rest + 1;
                while (more < s->at && *more == '0') more++;
                is_up = more < s->at || *time & 1;
            }
            *time += is_up;
        }
    }
    if (is_negative) *time = -*time;
    return 1;
}

static const struct key *find_key(const struct key *keys, int count, const uint8_t *name,
                                  int64_t length) {
    for (int i = 0; i < count; i++)
        if (keys[i].length == length && !memcmp(keys[i].name, name, (size_t)length)) return &keys[i];
    return NULL;
}

static const int64_t NO_ARGUMENTS[COLUMNS] = {
    [DEVICE] = -1, [STREAM] = -1, [CORRELATION] = -1, [BYTES] = -1,
    [SOURCE] = -1, [DESTINATION] = -1, [SEQUENCE] = -1,
};

static int is_scalar(int byte) { return byte == '"' || byte == 'n' || byte == '-' || (byte >= '0' && byte <= '9'); }

// Skips a string, null or number that a decoder accepts too: a number that it may read as a float has
// to be of usual size.
static int skip_scalar(struct scan *s) {
    struct number numeral;
    int byte = peek(s);
    if (!is_scalar(byte)) return 0;
    if (byte == '"' || byte == 'n') return skip_value(s, 0);
    return skip_number(s, &numeral) && !numeral.has_exponent && s->at - numeral.begin <= 100;
}

static int read_args(struct scan *s) {
    int64_t *row = s->row;
    memcpy(row + DEVICE, NO_ARGUMENTS + DEVICE, (COLUMNS - DEVICE) * sizeof *row);
    if (peek(s) == 'n') return skip_word(s, "null");
    row[ARGS_BEGIN] = s->at - s->text;
    if (!accept(s, '{')) return 0;
    if (!accept(s, '}')) {
        do {
            const uint8_t *name;
            int64_t length;
            if (!skip_key(s, &name, &length)) return 0;
            const struct key *key = find_key(ARGS_KEYS, COUNT(ARGS_KEYS), name, length);
            int byte = peek(s), ok;
            switch (key ? key->action & 0xff : -1) {
            case INTEGER:
                ok = read_integer(s, &row[key->action >> 8]);
                break;
            case GROUP:
                row[FLAGS] = (row[FLAGS] & ~HAS_GROUP) | (byte == 'n' ? 0 : HAS_GROUP);
                ok = skip_scalar(s);
                break;
            case ELEMENT: {
                const uint8_t *begin = s->at;
                ok = skip_scalar(s);
                int is_empty = byte == '"' && s->at - begin == 2;
                row[FLAGS] = (row[FLAGS] & ~HAS_ELEMENT) | (is_empty ? 0 : HAS_ELEMENT);
                break;
            }
            case SCALAR:
                ok = skip_scalar(s);
                break;
            default:
                ok = skip_value(s, 2);
            }
            if (!ok) return 0;
        } while (accept(s, ','));
        if (!accept(s, '}')) return 0;
    }
    row[ARGS_END] = s->at - s->text;
    return 1;
}

// Reads an event into the scan's row; *is_complete says whether it has a duration.
static int read_event(struct scan *s, int *is_complete) {
    int64_t *row = s->row;
    memcpy(row, NO_ARGUMENTS, sizeof NO_ARGUMENTS);
    row[CAT] = row[PID] = row[TID] = UNKNOWN;  // The last of the values: None; before it, "".
    row[NAME] = NO_NAME;
    row[START] = row[DURATION] = UNKNOWN;
    *is_complete = 0;
    if (!accept(s, '{')) return 0;
    if (accept(s, '}')) return 1;
    do {
        const uint8_t *name;
        int64_t length;
        if (!skip_key(s, &name, &length)) return 0;
        const struct key *key = find_key(EVENT_KEYS, COUNT(EVENT_KEYS), name, length);
        int64_t *into = key ? &row[key->action >> 8] : NULL;
        int ok;
        switch (key ? key->action & 0xff : -1) {
        case PH: {
            if (peek(s) != '"') return 0;
            const uint8_t *phase = s->at;
            ok = skip_string(s) == NONE;
            int is_letter = s->at - phase == 3;
            if (is_letter && (phase[1] == 'B' || phase[1] == 'E')) return 0;
            *is_complete = is_letter && phase[1] == 'X';
            break;
        }
        case TOKEN:
        case TEXT_TOKEN:
            ok = read_token(s, into, (key->action & 0xff) == TEXT_TOKEN);
            break;
        case TIME:
            ok = read_time(s, into);
            break;
        case ARGS:
            ok = read_args(s);
            break;
        default:
            ok = skip_value(s, 1);
        }
        if (!ok) return 0;
    } while (accept(s, ','));
    return accept(s, '}');
}

static int read_list(struct scan *s, int64_t *rows) {
    if (!accept(s, '[')) return 0;
    if (!accept(s, ']')) {
        do {
            int is_complete;
            if (!read_event(s, &is_complete)) return 0;
            if (!is_complete) continue;
            if (*rows >= s->capacity) return 0;
            for (int i = 0; i < COLUMNS; i++) s->rows[i * s->capacity + *rows] = s->row[i];
            ++*rows;
        } while (accept(s, ','));
        if (!accept(s, ']')) return 0;
    }
    return peek(s) == 0 && s->at == s->end;
}

// Scans a list of events: `rows` gets the events that have a duration, `tokens` the distinct texts that
// they name by number. Returns the number of rows; sets `token_count`.
EXPORTED int64_t gputrace_scan_events(const uint8_t *text, int64_t length, int64_t *rows,
                                      int64_t capacity, struct token *tokens,
                                      int64_t token_capacity, int64_t *token_count) {
    struct scan scan = {.text = text, .at = text, .end = text + length, .rows = rows,
                        .capacity = capacity, .tokens = tokens,
                        .token_capacity = token_capacity, .mask = 1023};
    if (token_capacity > INT32_MAX / 4) return UNSUPPORTED;
    while (scan.mask < 2 * (uint64_t)token_capacity) scan.mask = 2 * scan.mask + 1;
    scan.slots = calloc(scan.mask + 1, sizeof *scan.slots);
    if (!scan.slots) return NO_MEMORY;
    int64_t count = 0;
    int ok = read_list(&scan, &count);
    free(scan.slots);
    *token_count = scan.token_count;
    return ok ? count : UNSUPPORTED;
}
