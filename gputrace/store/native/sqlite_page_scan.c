// Scans the b-tree of an SQLite table into columns of integers, without SQLite's virtual machine.
//
// The format is described at sqlite.org/fileformat2.html. The file is only read, with pread, and nothing
// in it is trusted: every page number, offset and length is checked before it is used, and keys have to
// rise from row to row. Anything that SQLite would refuse, and values other than integers and NULL in
// the columns asked for, end the scan with a negative number. Then the caller asks SQLite itself, so
// that a scan returns either SQLite's answer or none.

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

enum { BROKEN = -1, UNSUPPORTED = -2, UNREADABLE = -3, NO_MEMORY = -4 };

enum {
    MAX_DEPTH = 20,        // Levels of a tree, as SQLite has them.
    MAX_COLUMNS = 24,      // Columns of one scan.
    MAX_FIELDS = 2000,     // Columns of a table that are looked through.
    MAX_KEY = 16,          // Serial types that identify a remembered layout.
    LAYOUTS = 16,          // Remembered layouts; a power of 2.
    SPARE = 16,            // Bytes behind a buffer that may be loaded, but are not used.
    BYTES_AT_ONCE = 1 << 18,
};

static const int64_t MAX_PAYLOAD = 64 << 20;
static const int64_t LOCK_BYTE = 1 << 30;  // No page holds this byte of the file.

struct file {
    int64_t pages;
    int32_t descriptor;
    int32_t page_size;
    int32_t usable;  // Bytes of a page that the tree may use.
    int32_t unused;
};

enum { NO_DEFAULT, NULL_DEFAULT, INTEGER_DEFAULT, ROWID };

// A column of the table.
struct column {
    int32_t index;     // In the record.
    int32_t absence;   // Its value in records that are too short to have it; or ROWID.
    int64_t constant;  // The INTEGER_DEFAULT.
};

enum { COLUMN, COALESCE, COALESCE_ROWID, SUBTRACTED, UNLESS_EQUAL };

// A number computed from a row: an output, or a condition that rows have to meet.
struct value {
    int32_t operation;
    int32_t column, second, third;  // Positions in the array of columns.
    int64_t equal, constant;
    void *output;    // One element for each row; NULL for a condition.
    int32_t width;   // Bytes of an element.
    int32_t ranges;  // Of a condition, which a number meets that is in one of them, and NULL never.
    const int64_t (*limits)[2];
};

static const uint8_t LENGTHS[12] = {0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0};

static uint32_t big_endian_16(const uint8_t *at) { return (uint32_t)at[0] << 8 | at[1]; }

static uint32_t big_endian_32(const uint8_t *at) { return big_endian_16(at) << 16 | big_endian_16(at + 2); }

static uint64_t big_endian_64(const uint8_t *at) {
    uint64_t number;
    memcpy(&number, at, sizeof number);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    number = __builtin_bswap64(number);
#endif
    return number;
}

// Reads a varint; returns the position behind it, or NULL where it goes beyond the end.
static const uint8_t *read_varint(const uint8_t *at, const uint8_t *end, uint64_t *number) {
    uint64_t sum = 0;
    for (int i = 0; i < 8; i++) {
        if (at >= end) return NULL;
        sum = sum << 7 | (*at & 0x7f);
        if (!(*at++ & 0x80)) {
            *number = sum;
            return at;
        }
    }
    if (at >= end) return NULL;
    *number = sum << 8 | *at;
    return at + 1;
}

static int read_pages(const struct file *file, uint32_t number, int64_t count, uint8_t *into) {
    int64_t offset = (int64_t)(number - 1) * file->page_size, size = count * file->page_size;
    if (number < 2 || number - 1 + count > file->pages) return BROKEN;
    if (offset <= LOCK_BYTE && LOCK_BYTE < offset + size) return BROKEN;
    while (size > 0) {
        ssize_t got = pread(file->descriptor, into, (size_t)size, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return UNREADABLE;
        into += got, offset += got, size -= got;
    }
    return 0;
}

static int is_supported(const struct file *file) {
    int32_t size = file->page_size;
    return size >= 512 && size <= 65536 && !(size & (size - 1)) && file->usable >= 480 &&
           file->usable <= size && file->pages > 0 && file->pages <= UINT32_MAX - 1;
}

// A walk down a tree to the leaves whose rows may be in a range of ids.
struct walk {
    const struct file *file;
    int64_t first, last, low;
    uint32_t *pages;
    int64_t *highs;
    int64_t capacity, count, visits;
    int depth, is_complete;
    uint8_t *buffers;
};

enum { INTERIOR_PAGE = 5, LEAF_PAGE = 13 };

// Finds a cell of a page, which has to lie behind the array that says where cells are; 0 if it does.
static int find_cell(const struct file *file, const uint8_t *page, int head, uint32_t cells,
                   uint32_t i, const uint8_t **cell) {
    uint32_t begin = big_endian_16(page + head + 2 * i), array = (uint32_t)head + 2 * cells;
    uint32_t last = (uint32_t)file->usable - 4 - (head == 12);
    if (begin < array || begin > last) return BROKEN;
    *cell = page + begin;
    return 0;
}

static uint32_t count_cells(const struct file *file, const uint8_t *page, int head) {
    uint32_t cells = big_endian_16(page + 3);
    uint32_t most = ((uint32_t)file->usable - (uint32_t)head) / 2;
    return cells <= (uint32_t)(file->page_size - 8) / 6 && cells <= most ? cells : UINT32_MAX;
}

static int descend(struct walk *walk, uint32_t child, int level, int64_t low, int64_t high);

static int visit_interior(struct walk *walk, uint32_t number, int level, int64_t low, int64_t high) {
    const struct file *file = walk->file;
    uint8_t *page = walk->buffers + (int64_t)level * (file->page_size + SPARE);
    // Pages of a tree are all different: after more visits than pages the walk goes in a circle.
    if (++walk->visits > file->pages) return BROKEN;
    int failed = read_pages(file, number, 1, page);
    if (failed) return failed;
    uint32_t cells = count_cells(file, page, 12);
    if (page[0] != INTERIOR_PAGE || cells == UINT32_MAX || cells == 0) return BROKEN;
    for (uint32_t i = 0; i < cells; i++) {
        const uint8_t *cell;
        uint64_t key;
        if (find_cell(file, page, 12, cells, i, &cell)) return BROKEN;
        if (!read_varint(cell + 4, page + file->usable, &key)) return BROKEN;
        int64_t middle = (int64_t)key;
        if (middle < low || middle >= high) return BROKEN;
        failed = descend(walk, big_endian_32(cell), level + 1, low, middle);
        if (failed) return failed;
        low = middle + 1;
    }
    return descend(walk, big_endian_32(page + 8), level + 1, low, high);
}

static int descend(struct walk *walk, uint32_t child, int level, int64_t low, int64_t high) {
    if (high < walk->first || walk->is_complete) return 0;
    if (level < walk->depth) return visit_interior(walk, child, level, low, high);
    if (walk->count >= walk->capacity) return BROKEN;
    if (!walk->count) walk->low = low;
    walk->pages[walk->count] = child;
    walk->highs[walk->count++] = high;
    walk->is_complete = low > walk->last;
    return 0;
}

// Returns the number of levels of interior pages above the first leaf.
static int find_depth(const struct file *file, uint32_t number, uint8_t *page) {
    for (int depth = 0; depth < MAX_DEPTH; depth++) {
        int failed = read_pages(file, number, 1, page);
        if (failed) return failed;
        if (page[0] == LEAF_PAGE) return depth;
        if (page[0] != INTERIOR_PAGE) return UNSUPPORTED;  // As tables WITHOUT ROWID.
        const uint8_t *cell;
        uint32_t cells = count_cells(file, page, 12);
        if (cells == UINT32_MAX || !cells || find_cell(file, page, 12, cells, 0, &cell)) return BROKEN;
        number = big_endian_32(cell);
    }
    return BROKEN;
}

// Lists the leaves that may have rows with ids from `first` to `last`, in the order of the table, each
// with its page and the highest id it may have; sets `low` to the lowest id of the first leaf. The leaf
// behind them is listed too, since SQLite would read on to its first row. Returns their number.
EXPORTED int64_t gputrace_list_leaves(const struct file *file, uint32_t root, int64_t first,
                                      int64_t last, uint32_t *pages, int64_t *highs,
                                      int64_t capacity, int64_t *low) {
    if (!is_supported(file)) return UNSUPPORTED;
    uint8_t *buffers = calloc(MAX_DEPTH, (size_t)file->page_size + SPARE);
    if (!buffers) return NO_MEMORY;
    struct walk walk = {.file = file, .first = first, .last = last, .low = first, .pages = pages,
                        .highs = highs, .capacity = capacity, .buffers = buffers};
    walk.depth = find_depth(file, root, buffers);
    int failed = walk.depth < 0 ? walk.depth : descend(&walk, root, 0, INT64_MIN, INT64_MAX);
    free(buffers);
    *low = walk.low;
    return failed ? failed : walk.count;
}

// Where a column's integer is in a record, and how it is read.
struct field {
    int32_t offset;  // From the start of the record.
    int16_t length;
    int8_t shift;    // To the right, of the eight bytes loaded there.
    int8_t is_null;
    int64_t constant;
};

// Fields of all records with the same first serial types.
struct layout {
    uint64_t key[2];
    int64_t end;  // Offset behind the last field that is looked at.
    uint32_t head;  // Length of the header; 0 in an empty place.
    struct field fields[MAX_COLUMNS];
};

struct scan {
    const struct file *file;
    const struct column *columns;
    const struct value *values;
    int32_t column_count, value_count;
    int fields;      // Number of fields of a record that are looked at.
    int has_filter;
    int is_plain;    // There are no conditions, and each value is a column.
    uint64_t mask[2];
    int64_t overflow_pages_left;  // That may still be read.
    uint8_t *overflow_page;
    int64_t row, capacity;
    struct layout spare;
    struct layout layouts[LAYOUTS];
    int8_t wanted[MAX_FIELDS];  // The column that a field is, or -1.
};

static int locate_field(const struct scan *scan, struct layout *layout, int field, uint64_t type,
                       int64_t offset) {
    int position = scan->wanted[field];
    if (position < 0) return 0;
    struct field *into = &layout->fields[position];
    *into = (struct field){.offset = (int32_t)offset};
    if (scan->columns[position].absence == ROWID) return 0;  // SQLite ignores what is stored.
    if (type == 0) {
        into->is_null = 1;
    } else if (type <= 6) {
        into->length = LENGTHS[type];
        into->shift = (int8_t)(64 - 8 * into->length);
    } else if (type == 8 || type == 9) {
        into->constant = (int64_t)type - 8;
    } else {
        return UNSUPPORTED;
    }
    return 0;
}

// Reads the header of a record; `at` is behind its length.
static int read_layout(const struct scan *scan, const uint8_t *record, const uint8_t *at,
                       uint64_t head, int64_t payload, struct layout *layout) {
    const uint8_t *end = record + head;
    int64_t offset = (int64_t)head;
    int field = 0;
    for (; field < scan->fields && at < end; field++) {
        uint64_t type = *at;
        if (type < 0x80) {
            at++;
        } else {
            at = read_varint(at, end, &type);
            if (!at || type > INT32_MAX) return BROKEN;
        }
        if (type == 10 || type == 11) return UNSUPPORTED;
        int failed = locate_field(scan, layout, field, type, offset);
        if (failed) return failed;
        offset += type < 12 ? LENGTHS[type] : (int64_t)(type - 12) / 2;
        if (offset > payload) return BROKEN;
    }
    if (at == end && offset != payload) return BROKEN;
    for (; field < scan->fields; field++) {  // Columns that were added after the row was written.
        int position = scan->wanted[field];
        if (position < 0) continue;
        const struct column *column = &scan->columns[position];
        if (column->absence == NO_DEFAULT) return UNSUPPORTED;
        layout->fields[position] = (struct field){.is_null = column->absence == NULL_DEFAULT,
                                                  .constant = column->constant};
    }
    layout->head = (uint32_t)head;
    layout->end = offset;
    return 0;
}

// Returns the layout of a record, if possible a remembered one; NULL with *failed set.
static const struct layout *find_layout(struct scan *scan, const uint8_t *record, int64_t local,
                                        int64_t payload, int *failed) {
    uint64_t head;
    const uint8_t *at = read_varint(record, record + local, &head);
    *failed = BROKEN;
    if (!at || head > (uint64_t)payload || head < (uint64_t)(at - record)) return NULL;
    if (head > (uint64_t)local) {
        *failed = UNSUPPORTED;
        return NULL;
    }
    // Headers with one byte for each field, and all fields, are remembered.
    int simple = scan->fields <= MAX_KEY && head >= (uint64_t)(at - record + scan->fields);
    struct layout *layout = &scan->spare;
    uint64_t key[2];
    if (simple) {
        memcpy(key, at, sizeof key);
        key[0] &= scan->mask[0], key[1] &= scan->mask[1];
        uint64_t mixed = (key[0] ^ (key[1] * 0x9e3779b97f4a7c15u)) * 0x9e3779b97f4a7c15u;
        layout = &scan->layouts[mixed >> 60];
        if (layout->head == head && layout->key[0] == key[0] && layout->key[1] == key[1]) {
            int is_whole = head == (uint64_t)(at - record + scan->fields);
            if (is_whole ? layout->end != payload : layout->end > payload) return NULL;
            return layout;
        }
        uint64_t wide = 0x8080808080808080u;
        if ((key[0] | key[1]) & wide) layout = &scan->spare, simple = 0;
    }
    layout->head = 0;
    *failed = read_layout(scan, record, at, head, payload, layout);
    if (*failed) {
        layout->head = 0;
        return NULL;
    }
    if (simple) memcpy(layout->key, key, sizeof key);
    return layout;
}

struct cell {
    const uint8_t *record;
    int64_t payload, local, rowid;
    uint32_t overflow;  // The first overflow page, or 0.
};

static int read_cell(const struct file *file, const uint8_t *page, const uint8_t *at,
                     struct cell *cell) {
    const uint8_t *end = page + file->usable;
    uint64_t payload, rowid;
    if (!(at = read_varint(at, end, &payload)) || !(at = read_varint(at, end, &rowid)))
        return BROKEN;
    if (payload > (uint64_t)MAX_PAYLOAD) return UNSUPPORTED;
    int64_t most = file->usable - 35, local = (int64_t)payload;
    cell->overflow = 0;
    if (local > most) {
        int64_t least = (file->usable - 12) * 32 / 255 - 23;
        int64_t surplus = least + (local - least) % (file->usable - 4);
        local = surplus <= most ? surplus : least;
        if (local + 4 > end - at) return BROKEN;
        cell->overflow = big_endian_32(at + local);
    } else if (local > end - at) {
        return BROKEN;
    }
    *cell = (struct cell){at, (int64_t)payload, local, (int64_t)rowid, cell->overflow};
    return 0;
}

// Reads bytes of a record that lie on its overflow pages, or end there.
static int read_overflow(struct scan *scan, const struct cell *cell, int64_t offset, int64_t length,
                       uint8_t *into) {
    const struct file *file = scan->file;
    uint32_t next = cell->overflow;
    int64_t begin = cell->local, held = file->usable - 4;
    for (; length > 0 && offset < begin; offset++, length--) *into++ = cell->record[offset];
    while (length > 0) {
        if (--scan->overflow_pages_left < 0) return BROKEN;
        int failed = read_pages(file, next, 1, scan->overflow_page);
        if (failed) return failed;
        for (; length > 0 && offset < begin + held; offset++, length--)
            *into++ = scan->overflow_page[4 + offset - begin];
        begin += held;
        next = big_endian_32(scan->overflow_page);
    }
    return 0;
}

static int read_numbers(struct scan *scan, const struct cell *cell, const struct layout *layout,
                        int64_t *numbers, uint8_t *nulls) {
    for (int i = 0; i < scan->column_count; i++) {
        const struct field *field = &layout->fields[i];
        nulls[i] = (uint8_t)field->is_null;
        if (scan->columns[i].absence == ROWID) {
            numbers[i] = cell->rowid;
            nulls[i] = 0;
        } else if (!field->length) {
            numbers[i] = field->constant;
        } else if (UNLIKELY(field->offset + field->length > cell->local)) {
            uint8_t bytes[8] = {0};
            int failed = read_overflow(scan, cell, field->offset, field->length, bytes);
            if (failed) return failed;
            numbers[i] = (int64_t)big_endian_64(bytes) >> field->shift;
        } else {
            numbers[i] = (int64_t)big_endian_64(cell->record + field->offset) >> field->shift;
        }
    }
    return 0;
}

// Computes a value, and whether it is NULL; returns 0, or UNSUPPORTED beyond 64 bits.
static inline int compute_value(const struct value *value, const int64_t *numbers, const uint8_t *nulls,
                          int64_t rowid, int64_t *number, int *is_null) {
    int column = value->column, second = value->second, third = value->third;
    *number = numbers[column];
    *is_null = nulls[column];
    switch (value->operation) {
    case COLUMN:
        return 0;
    case COALESCE:
        if (*is_null) *number = numbers[second], *is_null = nulls[second];
        return 0;
    case COALESCE_ROWID:
        if (!*is_null) return 0;
        *is_null = 0;
        return __builtin_sub_overflow(value->constant, rowid, number) ? UNSUPPORTED : 0;
    case SUBTRACTED:
        if (*is_null) return 0;
        return __builtin_sub_overflow(value->constant, numbers[column], number) ? UNSUPPORTED : 0;
    case UNLESS_EQUAL:
        if (!*is_null && *number == value->equal && !nulls[second] && !nulls[third] &&
            numbers[second] != numbers[third])
            *number = value->constant;
        return 0;
    default:
        return UNSUPPORTED;
    }
}

static int is_within(const struct value *value, int64_t number) {
    for (int i = 0; i < value->ranges; i++)
        if (value->limits[i][0] <= number && number <= value->limits[i][1]) return 1;
    return 0;
}

// Writes a number of the current row; one that is too large for its type is -1, as NULL is.
static inline void write_number(const struct scan *scan, const struct value *value,
                                int64_t number) {
    switch (value->width) {
    case 1:
        ((int8_t *)value->output)[scan->row] = number == (int8_t)number ? (int8_t)number : -1;
        break;
    case 2:
        ((int16_t *)value->output)[scan->row] = number == (int16_t)number ? (int16_t)number : -1;
        break;
    case 4:
        ((int32_t *)value->output)[scan->row] = number == (int32_t)number ? (int32_t)number : -1;
        break;
    default:
        ((int64_t *)value->output)[scan->row] = number;
    }
}

// Writes a row whose fields are all on the page, and whose values are all columns.
static int write_plain_row(struct scan *scan, const struct cell *cell,
                           const struct layout *layout) {
    if (scan->row >= scan->capacity) return BROKEN;
    for (int i = 0; i < scan->value_count; i++) {
        const struct value *value = &scan->values[i];
        const struct field *field = &layout->fields[value->column];
        int64_t number = field->is_null ? -1 : field->constant;
        if (field->length) number = (int64_t)big_endian_64(cell->record + field->offset) >> field->shift;
        else if (scan->columns[value->column].absence == ROWID) number = cell->rowid;
        write_number(scan, value, number);
    }
    scan->row++;
    return 0;
}

static int write_row(struct scan *scan, const int64_t *numbers, const uint8_t *nulls,
                     int64_t rowid) {
    int64_t number;
    int is_null, failed;
    if (scan->has_filter) {
        for (int i = 0; i < scan->value_count; i++) {
            const struct value *value = &scan->values[i];
            if (value->output) continue;
            if ((failed = compute_value(value, numbers, nulls, rowid, &number, &is_null))) return failed;
            if (is_null || !is_within(value, number)) return 0;
        }
    }
    if (scan->row >= scan->capacity) return BROKEN;
    for (int i = 0; i < scan->value_count; i++) {
        const struct value *value = &scan->values[i];
        if (!value->output) continue;
        if ((failed = compute_value(value, numbers, nulls, rowid, &number, &is_null))) return failed;
        if (is_null) number = -1;
        write_number(scan, value, number);
    }
    scan->row++;
    return 0;
}

// Reads the rows of a leaf with ids from `first` to `last`; all its ids have to be from `low` to `high`.
static int scan_leaf(struct scan *scan, const uint8_t *page, int64_t low, int64_t high,
                     int64_t first, int64_t last, int is_root) {
    uint32_t cells = count_cells(scan->file, page, 8);
    if (page[0] != LEAF_PAGE || cells == UINT32_MAX || (!cells && !is_root)) return BROKEN;
    int64_t numbers[MAX_COLUMNS];
    uint8_t nulls[MAX_COLUMNS];
    int failed, ended = 0;
    for (uint32_t i = 0; i < cells; i++) {
        const uint8_t *at;
        struct cell cell;
        if (find_cell(scan->file, page, 8, cells, i, &at)) return BROKEN;
        if ((failed = read_cell(scan->file, page, at, &cell))) return failed;
        if (ended || cell.rowid < low || cell.rowid > high) return BROKEN;
        if (cell.rowid == INT64_MAX) ended = 1; else low = cell.rowid + 1;
        if (cell.rowid < first || cell.rowid > last) continue;
        const struct layout *layout =
            find_layout(scan, cell.record, cell.local, cell.payload, &failed);
        if (!layout) return failed;
        if (scan->is_plain && layout->end <= cell.local) {
            if ((failed = write_plain_row(scan, &cell, layout))) return failed;
            continue;
        }
        if ((failed = read_numbers(scan, &cell, layout, numbers, nulls))) return failed;
        if ((failed = write_row(scan, numbers, nulls, cell.rowid))) return failed;
    }
    return 0;
}

static int prepare_scan(struct scan *scan) {
    if (!is_supported(scan->file) || scan->column_count > MAX_COLUMNS) return UNSUPPORTED;
    memset(scan->wanted, -1, sizeof scan->wanted);
    for (int i = 0; i < scan->column_count; i++) {
        int index = scan->columns[i].index;
        if (index < 0 || index >= MAX_FIELDS || scan->wanted[index] >= 0) return UNSUPPORTED;
        scan->wanted[index] = (int8_t)i;
        if (index >= scan->fields) scan->fields = index + 1;
    }
    scan->is_plain = 1;
    for (int i = 0; i < scan->value_count; i++) {
        const struct value *value = &scan->values[i];
        int32_t used[] = {value->column, value->second, value->third};
        for (int j = 0; j < 3; j++)
            if (used[j] < 0 || used[j] >= scan->column_count) return UNSUPPORTED;
        scan->has_filter |= !value->output;
        scan->is_plain &= value->output && value->operation == COLUMN;
    }
    uint8_t mask[MAX_KEY] = {0};
    memset(mask, 0xff, scan->fields < MAX_KEY ? (size_t)scan->fields : MAX_KEY);
    memcpy(scan->mask, mask, sizeof mask);
    scan->overflow_pages_left = scan->file->pages * scan->column_count;
    return 0;
}

// Reads rows of some consecutive leaves into the outputs of values, from element `row` on; returns the
// element behind the last row, which is at most `capacity`.
EXPORTED int64_t gputrace_scan_leaves(const struct file *file, const uint32_t *pages,
                                      const int64_t *highs, int64_t leaves, int64_t low,
                                      int64_t first, int64_t last, uint32_t root,
                                      const struct column *columns, int32_t column_count,
                                      const struct value *values, int32_t value_count,
                                      int64_t row, int64_t capacity) {
    struct scan *scan = calloc(1, sizeof *scan);
    if (!scan) return NO_MEMORY;
    scan->file = file, scan->columns = columns, scan->column_count = column_count;
    scan->values = values, scan->value_count = value_count;
    scan->row = row, scan->capacity = capacity;
    int failed = prepare_scan(scan);
    uint8_t *buffer = NULL;
    int64_t batch = 1;
    if (!failed) {
        if (file->page_size < BYTES_AT_ONCE) batch = BYTES_AT_ONCE / file->page_size;
        buffer = calloc((size_t)batch + 1, (size_t)file->page_size + SPARE);
        if (!buffer) failed = NO_MEMORY;
        else scan->overflow_page = buffer + batch * file->page_size + SPARE;
    }
    for (int64_t i = 0, count; i < leaves && !failed; i += count) {
        for (count = 1; count < batch && i + count < leaves; count++)
            if (pages[i + count] != pages[i] + (uint32_t)count) break;
        failed = read_pages(file, pages[i], count, buffer);
        for (int64_t j = 0; j < count && !failed; j++) {
            const uint8_t *page = buffer + j * file->page_size;
            failed = scan_leaf(scan, page, low, highs[i + j], first, last, pages[i + j] == root);
            if (highs[i + j] < INT64_MAX) low = highs[i + j] + 1;
        }
    }
    row = scan->row;
    free(buffer);
    free(scan);
    return failed ? failed : row;
}
