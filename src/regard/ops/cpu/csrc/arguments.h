// The arguments of the kernels, as structs of 8-byte fields. This is their only list: `regard.ops.cpu.arguments` reads it
// from this file to pack them. A field is int64_t, double, a pointer (nullptr where there is no such tensor), an array of
// these, or one of the structs that stand before it; one field a line.
#pragma once
#include <cstdint>

constexpr int kMaxRuns = 14;  // with `taken` and `done` two cache lines

// The counters that the threads of a call share.
struct Tasks {
  int64_t taken;  // the number of the next task; with runs, how many threads have begun
  int64_t done;   // how many tasks are finished
};

// The same, for tasks that form runs of neighbours.
struct TasksInRuns : Tasks {
  int64_t taken_of_runs[kMaxRuns];
};

// A contiguous tensor; a shape of fewer than four dimensions has leading ones.
template <typename T>
struct Array {
  T* data;
  int64_t shape[4];
};

// Keys or values [B,G,S,d] of any strides; the last dimension is contiguous.
struct Strided {
  const void* data;
  int64_t steps[3];  // from one row of the batch, head and slot to the next
};

// Keys or values that are stored as codes [B,G,R,lines,bytes] of a few bits.
struct Quantized {
  const uint8_t* data;
  int64_t steps[4];
  const void* scale;  // [B,G,R,lines,1], like `zero`
  const void* zero;
  int64_t scale_steps[4];
  int64_t group;  // the number of codes of a line
  int64_t bits;   // the number of bits of a code
};

// What decoding needs besides keys and values.
struct Decode : Tasks {
  int64_t T;       // the number of queries; row r of q is query r % T of head g H/G + r // T
  int64_t origin;  // the position of key 0, where the positions are contiguous
  double softcap;  // 0: none
  int64_t symmetric;  // whether ALiBi is symmetric
  double scale;
  Array<float> q;              // [B,G,R,D]
  Array<float> out;            // [B G,P,R,E], an output: the result of each of P splits
  Array<float> lse;            // [B,G,P,R], an output
  Array<int64_t> k_positions;  // [b,S], or [1,0] for positions from `origin` on
  Array<int64_t> starts;       // [b,h,t,n]: starts of the ranges that a query sees
  Array<int64_t> stops;        // [b,h,t,n]: one past the ends of these ranges
  Array<bool> visible;         // [b,h,t,S]: in place of ranges, which keys it sees, or [1,1,1,0]
  Array<float> slopes;         // [H], the slopes of ALiBi, or [0]
  Array<float> bias;           // [b,h,t,S], any other bias, or [1,1,1,0]
  Array<int64_t> q_positions;  // [b,T]
  int64_t S;                   // the number of keys
};

// Decoding over keys and values in full precision. With pages, slot s of row b is slot
// pages[b, s / page_size] page_size + s % page_size in memory.
struct DecodePlain : Decode {
  Array<int64_t> pages;  // [b,n], the pages of each row in order, or [1,0] without
  int64_t page_size;     // the number of slots of a page
  Strided k;
  Strided v;
};

// Decoding over keys and values that are stored as codes.
struct DecodeQuantized : Decode {
  Quantized k;
  Quantized v;
};

// y = W x + b for a few vectors x.
struct Gemv : TasksInRuns {
  int64_t R;      // the number of vectors
  int64_t M;      // the size of a vector of x
  int64_t N;      // the size of a vector of y
  const void* x;  // [R,M]
  const void* w;  // [N,M]
  const void* b;  // [N]
  void* y;        // [R,N]
  int64_t runs;   // the number of runs of tasks
};

// A matrix that is stored in fewer bits.
struct StoredMatrix : Tasks {
  int64_t form;        // the number of its form, in `regard.ops.stored_weights.FORMS`
  int64_t dtype;       // the number of the dtype of its scales, in `regard.ops.cpu.library.DTYPES`
  int64_t width;       // the number of columns in memory
  int64_t group;       // the number of columns for each scale
  int64_t row_bytes;   // the size in bytes of a row of codes
  int64_t row_scales;  // the number of scales, and zeros, of a row
  const void* codes;
  const void* scales;
};

// y = W x + b for a matrix that is stored in fewer bits.
struct StoredLinear : TasksInRuns {
  int64_t R;      // the number of vectors
  int64_t M;      // the size of a vector of x
  int64_t N;      // the size of a vector of y
  const void* x;  // [R,M]
  const StoredMatrix* matrix;
  const void* b;  // [N]
  void* y;        // [R,N]
  int64_t runs;   // the number of runs of tasks
};

// The numbers of some rows of codes.
struct Dequantize : Tasks {
  int64_t form;        // the number of its form, in `regard.ops.stored_weights.FORMS`; those of digits are not for this
  int64_t dtype;       // the number of the dtype of its scales, in `regard.ops.cpu.library.DTYPES`
  int64_t N;           // the number of rows
  int64_t M;           // the number of columns
  int64_t group;       // the number of columns for each scale
  int64_t row_bytes;   // the size in bytes of a row of codes
  int64_t row_scales;  // the number of scales, and zeros, of a row
  const void* codes;
  const void* scales;
  void* y;  // [N,M]
};

// The RMS norm of a few rows.
struct RmsNorm : Tasks {
  int64_t R;      // the number of rows
  int64_t M;      // the size of a row
  const void* x;  // [R,M]
  const void* w;  // [M]
  void* y;        // [R,M]
  double eps;     // added to the mean square
  double offset;  // added to the weight
};

// silu(gate) * up.
struct GatedProduct : Tasks {
  int64_t n;         // the number of elements
  const void* gate;  // [n]
  const void* up;    // [n]
  void* out;         // [n]
};

// Attention of many queries, and what their keys are. In the shapes b, h and t are B, H and T, or 1.
struct Prefill : Tasks {
  int64_t B;
  int64_t H;
  int64_t G;
  int64_t T;
  int64_t S;
  int64_t D;
  int64_t E;
  double scale;
  double softcap;              // 0: none
  int64_t symmetric;           // whether ALiBi is symmetric
  Strided q;                   // [B,H,T,D]
  Strided k;                   // [B,G,S,D]
  Strided v;                   // [B,G,S,E]
  Array<float> slopes;         // [H], the slopes of ALiBi, or [0]
  Array<int64_t> q_positions;  // [b,T], below 0 for empty slots, like those of the keys
  Array<int64_t> k_positions;  // [b,S]
  Array<int64_t> starts;       // [b,h,t,n]: starts of the ranges of positions that a query sees
  Array<int64_t> stops;        // [b,h,t,n]: one past the ends of these ranges
  int64_t threads;             // how many threads run the call
  int64_t is_wide;             // whether the output is fp32; otherwise it has the type of q
  int64_t bytes;               // how much memory the threads share, written by a call without memory
  void* memory;                // this memory, or nullptr
};

// Attention of many queries without a gradient.
struct PrefillForward : Prefill {
  void* out;                // [B,H,T,E]
  Array<float> max_score;   // [B,H,T], an output: the largest score of each query, 0 if it sees no key
  Array<float> scaled_sum;  // [B,H,T], an output: the sum of e^(score - largest)
};

// The gradients of the queries, keys and values.
struct PrefillGradient : Prefill {
  Strided out;              // [B,H,T,E]
  Strided d_out;            // [B,H,T,E], the gradient of the output
  int64_t d_out_is_wide;    // whether it is fp32
  Array<float> max_score;   // [B,H,T], as a call without a gradient returned them
  Array<float> scaled_sum;  // [B,H,T]
  Array<float> d_lse;       // [B,H,T], the gradient of the lse
  int64_t results_are_wide;  // whether the gradients are fp32
  void* d_q;                // [B,H,T,D], an output
  void* d_k;                // [B,G,S,D], an output
  void* d_v;                // [B,G,S,E], an output
};

// ---- one decoded token for each row of a batch through a whole model

// A norm of rows of M numbers, or a factor in its place.
struct StepNorm {
  int64_t kind;    // 0: none; the others in the order of `regard.ops.cpu.step.NORM_KINDS`
  const void* w;   // [M], or nullptr
  const void* b;   // [M], or nullptr
  double eps;      // added to the mean square, or to the variance
  double offset;   // added to the weight; or the factor
};

// A linear map W x + b, whose matrix may be stored in fewer bits; without either matrix there is no map.
struct StepMap {
  const void* w;  // [N,M]
  const void* b;  // [N]
  const StoredMatrix* stored;
};

// Queries, keys or values of a layer: a map, a norm over all heads, and a norm of each head. Head i is block
// first + i / run * step + i % run of the rows of the map.
struct StepHeads {
  int64_t n;     // the number of heads
  int64_t size;  // the size of a head
  int64_t first;
  int64_t run;
  int64_t step;
  StepMap map;
  StepNorm flat;
  StepNorm norm;
};

// A feed-forward network down (f(gate x) * up x), or down f(up x).
struct StepNetwork {
  int64_t F;           // the number of hidden units; 0: there is no network
  int64_t activation;  // in the order of `regard.ops.cpu.step.ACTIVATIONS`
  double limit;        // the limits of an activation that clips
  double alpha;        // its factor inside the sigmoid
  StepMap gate;
  StepMap up;
  StepMap down;
};

// A mixture of experts.
struct StepMixture {
  int64_t n;           // the number of experts; 0: there is no mixture
  int64_t k;           // how many of them a token uses
  int64_t sigmoid;     // whether scores are sigmoids of the logits; otherwise a softmax
  int64_t normalize;   // whether the weights of a token are divided by their sum
  double scale;        // the factor on the weights
  int64_t groups;      // the number of groups of experts; 0: no groups
  int64_t group_topk;  // how many groups a token may use
  int64_t group_best;  // how many experts of a group make up its score
  const void* correction;  // [n], added to the scores for the choice
  int64_t wide_correction;  // whether the correction is fp32, otherwise of the step's dtype
  int64_t* routing;    // 3 R k + 2 numbers, the choice of experts
  const StepNetwork* experts;
  StepMap router;
  StepNetwork shared;   // the network for all tokens
  StepMap shared_weight;  // the map to the logit of its weight
};

// One layer: attention, and a network or a mixture after it or beside it.
struct StepLayer {
  StepNorm before;  // of the input of the attention
  StepNorm after;   // of its result
  StepNorm ff_before;
  StepNorm ff_after;
  int64_t parallel;  // whether both sublayers read the same hidden states
  double clip;       // the limit of queries, keys and values; 0: none
  StepHeads q;
  StepHeads k;
  StepHeads v;
  StepMap out;
  const void* sink;     // [H], logits of sinks, or nullptr
  const int64_t* slots;  // [R], where the new keys and values go
  int64_t pairs;        // the number of rotary pairs of a head; 0: no rotation
  int64_t interleaved;  // whether pair i are the dims 2i, 2i + 1; otherwise i, i + pairs
  int64_t tables;       // the number of rows of cos and sin: R, or 1 for all
  const void* cos;      // [tables,pairs]
  const void* sin;      // [tables,pairs]
  DecodePlain attention;
  DecodeQuantized codes;  // over the slots that are stored as codes; S is 0 without
  StepNetwork network;
  StepMixture mixture;
};

// A model, and the memory of a step.
struct Step : Tasks {
  int64_t R;      // the number of rows of the batch, each with one token
  int64_t L;      // the number of layers
  int64_t M;      // the model dim
  int64_t V;      // the number of logits
  int64_t runs;   // the number of runs of tasks in a phase
  int64_t width;  // the largest size of a vector that is multiplied
  int64_t head;   // the largest size of a head
  int64_t flat;   // the numbers of queries and keys of a token before a norm over all heads
  StepLayer* layers;
  TasksInRuns* counters;  // of the phases: at most 6 L + 1
  const void* embedded;   // [R,M], the hidden states before the first layer
  void* x;                // [R,M], those before the attention of a layer
  void* x_mid;            // [R,M], those before its network
  void* y;                // [R,M], the result of a sublayer
  void* hidden;           // [R,F]; of a mixture [R k,F] for pairs of an expert and a token, then those of the shared network
  void* raw;              // [R,flat]
  float* router_logits;   // [R,n], then those of the gate of the shared network [R]
  float* shares;          // [R k], the weights of the pairs
  void* parts;            // [R k,M], the results of the pairs, then of the shared network [R,M]
  void* logits;           // [R,V], an output
  StepNorm norm;
  StepNorm scale;
  StepMap head_map;
};
