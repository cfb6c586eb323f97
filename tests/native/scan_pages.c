/* Scans the table of an SQLite file again and again, each time with some bytes of its pages changed;
 * made to be compiled with AddressSanitizer and UndefinedBehaviorSanitizer.
 *
 * Usage: scan_pages FILE ROOT COLUMNS RUNS SEED. Prints how many scans gave rows and how many none. */
#include "../../gputrace/store/native/sqlite_page_scan.c"

#include <stdio.h>
#include <sys/mman.h>

enum { OUTPUTS = 5 };

static uint64_t state;

static uint64_t draw(uint64_t below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % below;
}

static int64_t scan(const struct file *file, uint32_t root, int32_t column_count, int64_t first, int64_t rows) {
    uint32_t *pages = malloc((size_t)file->pages * sizeof *pages);
    int64_t *highs = malloc((size_t)file->pages * sizeof *highs), low, last = first + rows - 1, got;
    got = gputrace_list_leaves(file, root, first, last, pages, highs, file->pages, &low);
    if (got > 0) {
        struct column columns[MAX_COLUMNS];
        for (int i = 0; i < column_count; i++)
            columns[i] = (struct column){i + (i >= 4), i ? NULL_DEFAULT : ROWID, 0};  // The fifth has texts.
        static const int widths[OUTPUTS] = {8, 8, 4, 2, 1};
        int64_t limits[1][2] = {{-1000, INT64_MAX}};
        struct value values[OUTPUTS + 1];
        int is_plain = (int)draw(2);
        for (int i = 0; i < OUTPUTS; i++)
            values[i] = (struct value){is_plain ? COLUMN : i, i % column_count, (i + 1) % column_count, 0, 1, 1,
                                       malloc((size_t)(rows * widths[i])), widths[i], 0, NULL};
        values[OUTPUTS] = (struct value){.column = column_count - 1, .ranges = 1, .limits = limits};
        got = gputrace_scan_leaves(file, pages, highs, got, low, first, last, root, columns, column_count,
                                   values, OUTPUTS + (int32_t)draw(2), 0, rows);
        for (int i = 0; i < OUTPUTS; i++) free(values[i].output);
    }
    free(pages), free(highs);
    return got;
}

int main(int count, char **words) {
    if (count != 6) return 2;
    FILE *stream = fopen(words[1], "rb");
    if (!stream) return 2;
    fseek(stream, 0, SEEK_END);
    size_t size = (size_t)ftell(stream);
    uint8_t *bytes = malloc(size);
    rewind(stream);
    if (fread(bytes, 1, size, stream) != size) return 2;
    fclose(stream);
    uint32_t root = (uint32_t)atol(words[2]);
    int32_t columns = atoi(words[3]);
    state = (uint64_t)atoll(words[5]) * 2 + 1;
    uint32_t page = big_endian_16(bytes + 16) == 1 ? 65536 : big_endian_16(bytes + 16);
    struct file file = {(int64_t)(size / page), memfd_create("pages", 0), (int32_t)page,
                        (int32_t)page - bytes[20], 0};
    if (pwrite(file.descriptor, bytes, size, 0) != (ssize_t)size) return 2;
    long scanned = 0, refused = 0;
    for (long run = atol(words[4]); run; run--) {
        size_t at[8], changes = draw(8);  // None at all, too: such a scan has to give rows.
        for (size_t i = 0; i < changes; i++) {
            at[i] = page + draw(size - page);
            // Half of them in heads of pages, arrays of cells and pointers to pages.
            if (draw(2)) at[i] = at[i] / page * page + draw(48);
            uint8_t odd[] = {(uint8_t)draw(256), 0, 0xff, 0x7f, 0x80, (uint8_t)draw(64)};
            if (pwrite(file.descriptor, &odd[draw(6)], 1, (off_t)at[i]) != 1) return 2;
        }
        int64_t first = draw(4) ? 1 : (int64_t)draw(100);
        int64_t rows = scan(&file, root, columns, first, 1 + (int64_t)draw(2000));
        rows < 0 ? refused++ : scanned++;
        if (!changes && rows < 0) return 3;
        for (size_t i = 0; i < changes; i++)
            if (pwrite(file.descriptor, bytes + at[i], 1, (off_t)at[i]) != 1) return 2;
    }
    free(bytes);
    printf("%ld %ld\n", scanned, refused);
    return 0;
}
