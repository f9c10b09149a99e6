/* Local steps of SGD, of momentum and of linear rules for stacks of linear layers: all of one client.

   A client's weights, its batch and all that lies between stay in the caches of one core from step
   to step.  Activations lie feature by feature, with examples side by side, so that every product
   adds up numbers times vectors; only a layer's input is turned, for its weights.

   Letters: B examples of a batch, P the same rounded up to whole vectors, I inputs and O outputs of
   a layer. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if BITS == 32
typedef float real;
typedef int32_t integer;
#else
typedef double real;
typedef int64_t integer;
#endif

#if defined(__AVX512F__)
enum { WIDTH = 64, MOST_ROWS = 8 };
#elif defined(__AVX2__) && defined(__FMA__)
enum { WIDTH = 32, MOST_ROWS = 4 };
#else
#error "without AVX2 torch's own products are faster"
#endif
enum {
    LANES = WIDTH / sizeof(real),
    MOST_VECTORS = 3,    /* of a tile, beside its rows: sums stay in registers */
    DEPTH = 4096 / BITS, /* inputs added up at a time: they stay in the first cache */
    LINE = 64,           /* bytes of a line of a cache */
    LINES_A_TILE = 12,   /* that are brought near while the weights of a tile are moved */
};

typedef real vector __attribute__((vector_size(WIDTH), aligned(sizeof(real)), may_alias));
typedef integer integers __attribute__((vector_size(WIDTH), aligned(sizeof(real)), may_alias));
#define INLINE static inline __attribute__((always_inline))

INLINE vector load(const real *at) { return *(const vector *)at; }
INLINE void store(real *at, vector value) { *(vector *)at = value; }
INLINE vector all(real value) { return value - (vector){0}; }
INLINE vector chosen(integers which, vector yes, vector no) {
    return (vector)((which & (integers)yes) | (~which & (integers)no));
}
INLINE int64_t rounded(int64_t count, int64_t up_to) { return (count + up_to - 1) / up_to * up_to; }

/* Call `tile` for a tile of `rows` by `vectors`: the compiler writes a loop for each. */
#define TILE(tile)                                                                                 \
    switch (rows * 4 + vectors) {                                                                  \
    case 33: tile(8, 1); break;                                                                    \
    case 34: tile(8, 2); break;                                                                    \
    case 35: tile(8, 3); break;                                                                    \
    case 17: tile(4, 1); break;                                                                    \
    case 18: tile(4, 2); break;                                                                    \
    case 19: tile(4, 3); break;                                                                    \
    case 9: tile(2, 1); break;                                                                     \
    case 10: tile(2, 2); break;                                                                    \
    case 11: tile(2, 3); break;                                                                    \
    case 5: tile(1, 1); break;                                                                     \
    case 6: tile(1, 2); break;                                                                     \
    case 7: tile(1, 3); break;                                                                     \
    }

INLINE int tile_rows(int64_t left) {
    int rows = MOST_ROWS;
    while (rows > left) rows /= 2;
    return rows;
}

INLINE int tile_vectors(int64_t numbers) {
    int64_t left = numbers / LANES;
    return left < MOST_VECTORS ? (int)left : MOST_VECTORS;
}

/* out[r][b] (+)= sum over k of left[r * far + k * near] * right[k][b] */
INLINE void add_up(const int R, const int N, real *out, const real *left, int64_t far,
                   int64_t near, const real *right, int64_t P, int64_t depth, int first,
                   const real *bias) {
    vector sums[8][3];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            sums[r][n] = first ? all(bias ? bias[r] : 0) : load(out + r * P + n * LANES);
    for (int64_t k = 0; k < depth; k++) {
        vector x[3];
        for (int n = 0; n < N; n++) x[n] = load(right + k * P + n * LANES);
        for (int r = 0; r < R; r++) {
            vector number = all(left[r * far + k * near]);
            for (int n = 0; n < N; n++) sums[r][n] += number * x[n];
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) store(out + r * P + n * LANES, sums[r][n]);
}

/* out[count][P] = left[count][depth], whose strides are given, times right[depth][P], plus bias */
static void multiply(real *out, int64_t count, const real *left, int64_t far, int64_t near,
                     const real *right, int64_t P, int64_t depth, const real *bias) {
    for (int64_t k = 0; k < depth; k += DEPTH) {
        int64_t deep = depth - k < DEPTH ? depth - k : DEPTH;
        for (int64_t b = 0; b < P; b += MOST_VECTORS * LANES) {
            int vectors = tile_vectors(P - b), rows;
            for (int64_t r = 0; r < count; r += rows) {
                rows = tile_rows(count - r);
#define ADD_UP(R, N)                                                                               \
    add_up(R, N, out + r * P + b, left + r * far + k * near, far, near, right + k * P + b, P,      \
           deep, k == 0, bias ? bias + r : 0)
                TILE(ADD_UP)
            }
        }
    }
}

/* Rows that will be read next, brought near line by line while something else is computed. */
struct ahead {
    const real *const *rows;
    int64_t count, length, row, column; /* how many, how long, and where it stands */
};

INLINE void bring_near(struct ahead *next) {
    for (int some = 0; some < LINES_A_TILE && next->row < next->count; some++) {
        __builtin_prefetch(next->rows[next->row] + next->column, 0, 2);
        next->column += LINE / sizeof(real);
        if (next->column >= next->length) {
            next->column = 0;
            next->row++;
        }
    }
}

/* What a step does to every number of the vectors that move, the weights first: each becomes a
   combination of the gradient and of what stands at its place in all vectors. */
enum { MOST_MOVING = 4, MOST_HELD = 8 };
struct mix {
    int64_t moving, held;     /* vectors that move; all of them, those that move first */
    real *rows[MOST_HELD];    /* a client's rows */
    struct {
        real gradient, by[MOST_HELD];
        int terms, from[MOST_HELD]; /* of these alone, by the first so many of `by` */
    } of[MOST_MOVING];
};

/* Mix one number at a place. */
INLINE void mix_number(const struct mix *m, int64_t at, real gradient) {
    real held[MOST_HELD];
    for (int64_t j = 0; j < m->held; j++) held[j] = m->rows[j][at];
    for (int64_t i = 0; i < m->moving; i++) {
        real made = m->of[i].gradient * gradient;
        for (int t = 0; t < m->of[i].terms; t++) made += m->of[i].by[t] * held[m->of[i].from[t]];
        m->rows[i][at] = made;
    }
}

/* Mix a vector of numbers that begin at a place; those that shall stay do. */
INLINE void mix_vector(const struct mix *m, int64_t at, vector gradient, int done, integers stay) {
    vector held[MOST_HELD];
    for (int64_t j = 0; j < m->held; j++) held[j] = load(m->rows[j] + at);
    for (int64_t i = 0; i < m->moving; i++) {
        vector made = m->of[i].gradient * gradient;
        for (int t = 0; t < m->of[i].terms; t++) made += m->of[i].by[t] * held[m->of[i].from[t]];
        store(m->rows[i] + at, done ? chosen(stay, held[i], made) : made);
    }
}

/* How a step moves weights: w = keep * w - rate * gradient, or as a mix says. */
struct how {
    real keep, rate;
    const struct mix *mix; /* 0: there is none */
    const real *first;     /* of a client's weights: places are counted from here */
};

/* Move w[r][i] by the sum over b of g[r][b] * x[b][i], for the vectors from i on; of their columns
   the first few may be `done` already, and stay.  Rows shorter than a vector are moved number by
   number. */
INLINE void move_tile(const int R, const int N, real *w, int64_t I, const real *g, int64_t P,
                      const real *const *x, int64_t i, int64_t B, const struct how *how,
                      int done) {
    const real keep = how->keep, rate = how->rate;
    vector sums[8][3];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sums[r][n] = all(0);
    for (int64_t b = 0; b < B; b++) {
        vector v[3];
        for (int n = 0; n < N; n++) v[n] = load(x[b] + i + n * LANES);
        for (int r = 0; r < R; r++) {
            vector number = all(g[r * P + b]);
            for (int n = 0; n < N; n++) sums[r][n] += number * v[n];
        }
    }
    integers stay;
    for (int lane = 0; lane < LANES; lane++) stay[lane] = lane < done ? -1 : 0;
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) {
            real *at = w + r * I + i + n * LANES;
            if (how->mix) {
                int64_t place = at - how->first;
                if (I >= LANES)
                    mix_vector(how->mix, place, sums[r][n], done, stay);
                else
                    for (int64_t j = 0; j < I; j++)
                        mix_number(how->mix, place + j, sums[r][n][j]);
                continue;
            }
            if (I < LANES) {
                for (int64_t j = 0; j < I; j++) at[j] = keep * at[j] - rate * sums[r][n][j];
                continue;
            }
            vector before = load(at), after = keep * before - rate * sums[r][n];
            store(at, done ? chosen(stay, before, after) : after);
        }
}

static void move_columns(real *w, int64_t O, int64_t I, const real *g, int64_t P,
                         const real *const *x, int64_t i, int vectors, int64_t B,
                         const struct how *how, int done, struct ahead *next) {
    int rows;
    for (int64_t r = 0; r < O; r += rows) {
        rows = tile_rows(O - r);
        bring_near(next);
#define MOVE(R, N) move_tile(R, N, w + r * I, I, g + r * P, P, x, i, B, how, done)
        TILE(MOVE)
    }
}

/* Take the step of a layer: weights [O][I] by gradients [O][P] and inputs x[b] of B examples. */
static void move(real *w, int64_t O, int64_t I, const real *g, int64_t P, const real *const *x,
                 int64_t B, const struct how *how, struct ahead *next) {
    int64_t even = I / LANES * LANES;
    for (int64_t i = 0; i < even; i += MOST_VECTORS * LANES)
        move_columns(w, O, I, g, P, x, i, tile_vectors(even - i), B, how, 0, next);
    if (even == I) return;
    /* a vector that ends where rows do, or one that holds a row and zeros behind it */
    int64_t last = even ? I - LANES : 0;
    move_columns(w, O, I, g, P, x, last, 1, B, how, even ? (int)(even - last) : 0, next);
}

/* Exchange, between rows that lie `far` from each other, what is on the wrong side. */
INLINE void turn_stage(vector rows[LANES], const int far) {
#if defined(__clang__)
    for (int r = 0; r < LANES; r++)
        for (int j = 0; j < LANES; j++)
            if (!(r & far) && (j & far)) {
                real held = rows[r][j];
                rows[r][j] = rows[r + far][j - far];
                rows[r + far][j - far] = held;
            }
#else
    integers low, high;
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) {
        low[j] = j & far ? LANES + j - far : j;
        high[j] = j & far ? LANES + j : j + far;
    }
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++)
        if (!(r & far)) {
            vector a = rows[r], b = rows[r + far];
            rows[r] = __builtin_shuffle(a, b, low);
            rows[r + far] = __builtin_shuffle(a, b, high);
        }
#endif
}

/* Turn LANES rows: afterwards rows[r][j] is what rows[j][r] was. */
INLINE void turn_block(vector rows[LANES]) {
    turn_stage(rows, 1);
    turn_stage(rows, 2);
    if (LANES > 4) turn_stage(rows, 4);
    if (LANES > 8) turn_stage(rows, 8);
}

/* out[i * far + b] = x[b][i] for `count` rows of x; whole vectors are written, with zeros. */
static void turn(real *out, int64_t far, const real *const *x, int64_t count, int64_t length) {
    for (int64_t b = 0; b < count; b += LANES) {
        int some = count - b < LANES ? (int)(count - b) : LANES;
        int64_t i = 0;
        for (; i + LANES <= length; i += LANES) {
            vector rows[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) rows[r] = r < some ? load(x[b + r] + i) : all(0);
            turn_block(rows);
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) store(out + (i + r) * far + b, rows[r]);
        }
        for (; i < length; i++)
            for (int r = 0; r < LANES; r++) out[i * far + b + r] = r < some ? x[b + r][i] : 0;
    }
}

/* Where `by` is not above zero y becomes zero; where it is no number, y stays. */
static void cut(real *y, const real *by, int64_t count) {
    for (int64_t j = 0; j < count; j += LANES) {
        vector value = load(y + j);
        store(y + j, chosen(load(by + j) <= 0, all(0), value));
    }
}

/* e^x for x up to 0, to the last digit or two. */
INLINE vector exponential(vector x) {
#if BITS == 32
    integers sound = (x >= -87.0f), number = (x == x);
    vector safe = chosen(sound, x, all(0));
    /* towards 0, and so to the nearest one */
    integers power = __builtin_convertvector(safe * 1.44269504f - 0.5f, integers);
    vector n = __builtin_convertvector(power, vector);
    vector r = (safe - n * 0.693359375f) + n * 2.12194440e-4f;
    vector p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    p = p * (vector)((power + 127) << 23);
    return chosen(number, chosen(sound, p, all(0)), x);
#else
    for (int lane = 0; lane < LANES; lane++) x[lane] = exp(x[lane]);
    return x;
#endif
}

struct told {
    real loss, correct; /* means over a batch */
};

/* Cross-entropy of logits z [O][P] and labels; z becomes the gradient of the mean loss. */
static struct told judge(real *z, int64_t O, int64_t P, const int64_t *label, int64_t B) {
    double loss = 0;
    int64_t correct = 0;
    real share = 1 / (real)B;
    for (int64_t b = 0; b < P; b += LANES) {
        vector most = load(z + b), place = all(0), sum = all(0), hit = all(0), mine = all(0);
        for (int64_t o = 1; o < O; o++) {
            vector value = load(z + o * P + b);
            /* the first of the largest; what is no number is larger than all */
            integers more = ~(value <= most) & (most == most);
            most = chosen(more, value, most);
            place = chosen(more, all((real)o), place);
        }
        for (int lane = 0; lane < LANES && b + lane < B; lane++) {
            hit[lane] = (real)label[b + lane];
            mine[lane] = z[label[b + lane] * P + b + lane];
        }
        for (int64_t o = 0; o < O; o++) {
            vector value = exponential(load(z + o * P + b) - most);
            store(z + o * P + b, value);
            sum += value;
        }
        vector each = share / sum;
        for (int lane = 0; lane < LANES; lane++) {
            if (b + lane >= B) {
                each[lane] = 0;
                continue;
            }
            loss += log(sum[lane]) + (most[lane] - mine[lane]);
            correct += place[lane] == hit[lane];
        }
        integers there;
        for (int lane = 0; lane < LANES; lane++) there[lane] = b + lane < B ? -1 : 0;
        for (int64_t o = 0; o < O; o++) {
            integers own = (hit == (real)o);
            vector g = load(z + o * P + b) * each - chosen(own, all(share), all(0));
            store(z + o * P + b, chosen(there, g, all(0)));
        }
    }
    return (struct told){(real)(loss / (double)B), (real)correct / (real)B};
}

/* A stack of linear layers, and where its parameters lie in a client's row. */
struct stack {
    int64_t layers;
    const int64_t *sizes;   /* layers + 1: features between two of them */
    const int64_t *cuts;    /* whether ReLU follows */
    const int64_t *weights; /* where they begin */
    const int64_t *biases;  /* -1: none */
};

/* The examples of one step. */
struct batch {
    const real **rows;
    int64_t *labels, count;
};

/* Memory that all steps of a call share. */
struct room {
    struct batch batches[2]; /* of this step and the next one */
    const real **inputs;     /* rows of what goes into a layer behind the first */
    real **columns;          /* by layer what goes in, feature by feature; then what comes out */
    real *turned;            /* the same of one layer, example by example */
    real *gradients[2];
};

/* Share out memory, or only count how many bytes there must be. */
static int64_t share_out(const struct stack *s, int64_t batch, char *from, struct room *to) {
    int64_t P = rounded(batch, LANES), most = 0, used = 0;
    for (int64_t l = 1; l <= s->layers; l++) most = s->sizes[l] > most ? s->sizes[l] : most;
    int64_t wide = rounded(most, LANES);
#define PIECE(name, type, count)                                                                   \
    if (from) to->name = (type *)(from + used);                                                    \
    used += rounded((count) * (int64_t)sizeof(type), LINE)
    for (int side = 0; side < 2; side++) {
        PIECE(batches[side].rows, const real *, P);
        PIECE(batches[side].labels, int64_t, P);
        PIECE(gradients[side], real, most * P);
    }
    PIECE(inputs, const real *, P > most ? P : most);
    PIECE(columns, real *, s->layers + 1);
    PIECE(turned, real, wide * P);
    for (int64_t l = 0; l <= s->layers; l++) {
        PIECE(columns[l], real, s->sizes[l] * P);
    }
    return used;
}

/* How many bytes `undrift_dense_train` needs beside what it is given. */
int64_t undrift_dense_room(const struct stack *s, int64_t batch) {
    return share_out(s, batch, 0, 0);
}

/* What a client trains on. */
struct work {
    const real *x;       /* examples of everybody, as long as the first layer is wide */
    const int64_t *y;    /* their labels */
    const int64_t *rows; /* [step][batch]: which of them, -1 where there is none */
    int64_t steps, batch;
};

/* Find the examples of a step, none behind the last; gives 0, or one more than the number of an
   example whose label is none. */
static int64_t find(const struct stack *s, const struct work *work, int64_t step,
                    struct batch *found) {
    const int64_t *rows = work->rows + step * work->batch;
    found->count = 0;
    for (int64_t place = 0; place < work->batch && step < work->steps; place++) {
        int64_t at = rows[place];
        if (at < 0) continue;
        if (work->y[at] < 0 || work->y[at] >= s->sizes[s->layers]) return at + 1;
        found->labels[found->count] = work->y[at];
        found->rows[found->count++] = work->x + at * s->sizes[0];
    }
    return 0;
}

/* Take the step of a layer's bias. */
static void move_bias(real *bias, int64_t O, const real *g, int64_t P, const struct how *how) {
    for (int64_t o = 0; o < O; o += LANES) {
        int some = O - o < LANES ? (int)(O - o) : LANES;
        vector rows[LANES], sum = all(0);
        for (int r = 0; r < LANES; r++) rows[r] = all(0);
        for (int r = 0; r < some; r++)
            for (int64_t b = 0; b < P; b += LANES) rows[r] += load(g + (o + r) * P + b);
        turn_block(rows);
        for (int r = 0; r < LANES; r++) sum += rows[r];
        for (int r = 0; r < some; r++)
            if (how->mix)
                mix_number(how->mix, bias + o + r - how->first, sum[r]);
            else
                bias[o + r] = how->keep * bias[o + r] - how->rate * sum[r];
    }
}

/* Take one step of a client, and bring the next examples near. */
static struct told step(const struct stack *s, const struct room *m, real *w,
                        const struct batch *now, const struct batch *next,
                        const struct how *how) {
    int64_t L = s->layers, B = now->count, P = rounded(B, LANES);
    const int64_t *sizes = s->sizes;
    struct ahead nothing = {0}, ahead = {next->rows, next->count, sizes[0], 0, 0};
    turn(m->columns[0], P, now->rows, B, sizes[0]);
    for (int64_t l = 0; l < L; l++) {
        int64_t I = sizes[l], O = sizes[l + 1];
        const real *bias = s->biases[l] < 0 ? 0 : w + s->biases[l];
        real *out = m->columns[l + 1];
        multiply(out, O, w + s->weights[l], I, 1, m->columns[l], P, I, bias);
        if (s->cuts[l]) cut(out, out, O * P);
    }
    real *g = m->columns[L];
    struct told found = judge(g, sizes[L], P, now->labels, B);
    for (int64_t l = L - 1; l >= 0; l--) {
        int64_t I = sizes[l], O = sizes[l + 1], wide = rounded(I, LANES);
        real *weight = w + s->weights[l], *further = m->gradients[l % 2];
        const real **inputs = now->rows;
        if (!l && I < LANES) { /* rows that a vector may be read of */
            inputs = m->inputs;
            for (int64_t b = 0; b < B; b++) {
                inputs[b] = m->turned + b * LANES;
                memset(m->turned + b * LANES, 0, WIDTH);
                memcpy(m->turned + b * LANES, now->rows[b], (size_t)I * sizeof(real));
            }
        }
        if (l) {
            multiply(further, I, weight, 1, I, g, P, O, 0);
            if (s->cuts[l - 1]) cut(further, m->columns[l], I * P);
            inputs = m->inputs;
            for (int64_t i = 0; i < I; i++) inputs[i] = m->columns[l] + i * P;
            turn(m->turned, wide, inputs, I, P);
            for (int64_t b = 0; b < B; b++) inputs[b] = m->turned + b * wide;
        }
        move(weight, O, I, g, P, inputs, B, how, l ? &nothing : &ahead);
        if (s->biases[l] >= 0) move_bias(w + s->biases[l], O, g, P, how);
        g = further;
    }
    return found;
}

/* The vectors of a client under linear rules, and what each step makes of them. */
struct chain {
    int64_t moving, held;
    real *const *rows;  /* [held] */
    const real *shares; /* [step][moving][1 + held], the gradient's first */
};

/* Write down what a step does, without all that has no part in it. */
static void mix_of(struct mix *m, const struct chain *chain, int64_t step) {
    int64_t count = 1 + chain->held;
    m->moving = chain->moving;
    m->held = chain->held;
    for (int64_t j = 0; j < chain->held; j++) m->rows[j] = chain->rows[j];
    for (int64_t i = 0; i < chain->moving; i++) {
        const real *share = chain->shares + (step * chain->moving + i) * count;
        m->of[i].gradient = share[0];
        m->of[i].terms = 0;
        for (int j = 0; j < chain->held; j++)
            if (share[1 + j] != 0) {
                m->of[i].by[m->of[i].terms] = share[1 + j];
                m->of[i].from[m->of[i].terms++] = j;
            }
    }
}

/* Train a client, whose parameters are w: step by step w = keep * w - rate * gradient, or as a
   chain says, where there is one.

   Adds means over batches to `loss` and `correct`.  Gives 0, or one more than the number of an
   example whose label is none. */
int64_t undrift_dense_train(const struct stack *s, const struct work *work, char *memory,
                            const real *rates, const real *keeps, const struct chain *chain,
                            real *w, real *loss, real *correct) {
    struct room m = {0};
    struct mix mix;
    share_out(s, work->batch, memory, &m);
    int64_t wrong = find(s, work, 0, &m.batches[0]);
    for (int64_t k = 0; k < work->steps && !wrong; k++) {
        struct batch *now = &m.batches[k % 2], *next = &m.batches[1 - k % 2];
        wrong = find(s, work, k + 1, next);
        if (!now->count || wrong) continue;
        struct how how = {0, 0, chain ? &mix : 0, w};
        if (chain)
            mix_of(&mix, chain, k);
        else
            how = (struct how){keeps[k], rates[k], 0, w};
        struct told told = step(s, &m, w, now, next, &how);
        *loss += told.loss;
        *correct += told.correct;
    }
    return wrong;
}
