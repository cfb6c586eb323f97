/* Scans a list of events again and again, each time with some bytes changed, cut or repeated; made to
 * be compiled with AddressSanitizer and UndefinedBehaviorSanitizer.
 *
 * Usage: scan_events FILE RUNS SEED. Prints how many scans gave rows and how many none. */
#include "../../gputrace/readers/native/event_scan.c"

#include <stdio.h>

static uint64_t state;

static uint64_t draw(uint64_t below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % below;
}

int main(int count, char **words) {
    if (count != 4) return 2;
    FILE *stream = fopen(words[1], "rb");
    if (!stream) return 2;
    fseek(stream, 0, SEEK_END);
    size_t size = (size_t)ftell(stream);
    uint8_t *bytes = malloc(size);
    rewind(stream);
    if (fread(bytes, 1, size, stream) != size) return 2;
    fclose(stream);
    state = (uint64_t)atoll(words[3]) * 2 + 1;
    static const uint8_t odd[] = "{}[],:\"\\u0-.eEtn \n\xff";
    long scanned = 0, left = 0;
    for (long run = atol(words[2]); run; run--) {
        // Exactly as long as the text, so that a byte behind it is noticed.
        size_t length = draw(4) ? size : draw(size);
        uint8_t *text = malloc(length ? length : 1);
        memcpy(text, bytes, length);
        size_t changes = length ? draw(4) : 0;
        for (size_t i = 0; i < changes; i++)
            text[draw(length)] = draw(2) ? odd[draw(sizeof odd)] : (uint8_t)draw(256);
        int64_t capacity = (int64_t)draw(200), token_capacity = (int64_t)draw(200), tokens;
        int64_t *rows = malloc((size_t)(COLUMNS * capacity + 1) * sizeof *rows);
        struct token *spans = malloc((size_t)(token_capacity + 1) * sizeof *spans);
        int64_t got = gputrace_scan_events(text, (int64_t)length, rows, capacity, spans,
                                           token_capacity, &tokens);
        for (int64_t i = 0; i < tokens; i++)
            if (spans[i].begin < 0 || spans[i].begin >= spans[i].end ||
                spans[i].end > (int64_t)length)
                return 3;
        for (int64_t row = 0; row < got; row++)
            for (int column = 0; column <= TID; column++)
                if (rows[column * capacity + row] >= tokens) return 4;
        got < 0 ? left++ : scanned++;
        free(rows), free(spans), free(text);
    }
    free(bytes);
    printf("%ld %ld\n", scanned, left);
    return 0;
}
