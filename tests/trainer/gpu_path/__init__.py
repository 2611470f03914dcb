"""The path of a GPU, tested without one, in about a minute and a half of one core.

test_groups    process groups as NCCL's are made, a device bound: every product of pp, dp_replicate,
               dp_shard, cp, tp and ep of 2, 3, 4 and 6 ranks, of 8 those of three axes of 2; the
               meshes, an all-reduce in each group, and for axes of 2 the model, the optimizer and
               the checkpointer; that all ranks ask for the same groups in the same order
test_step      two steps (forward, loss, backward, sums, update, the numbers one step late) on
               tensors that say that they are on a GPU: no mixed devices, no operator without a
               kernel for CUDA, no wait of the host but for the numbers, no addition in an order
               that differs: tied weights, biases, windows, documents, norms, experts, each
               optimizer, recomputation, LoRA, DPO, reward models, RL's loss; generation, where the
               host may wait as GENERATION there names
test_experts   which products of experts a GPU gets, by its compute capability and their sizes, and
               what is left in the gradients of those without a token
test_exchange  experts of two ranks whose rows travel in buffers: the host waits for nothing, the
               compiler makes one graph, what is no row goes nowhere, and shared experts run
               between the two halves of an exchange, forward and backward
test_ring      the ring of context parallelism itself, forward and backward, in fp32
test_kept      which attention `recompute = selective` keeps
test_updates   how often the update in bf16 is compiled
test_fixed     the shapes of passes with a cache of a fixed size
test_imports   no import asks for CUDA or sets a variable; no process is forked by default
test_between   gradients that wait for the last micro-batch (sync_once), rounds of replicas with
               each compression, adapters merged for engines, a rank of experts without tokens
test_kernels   branches that only a GPU takes, with CPU kernels for their operators, against the
               plain ones, gradients too: variable-length attention, flash attention in a ring of 2
               and 4, grouped products of experts without a token
test_compiled  no graph break in a block, and how often it is compiled: once for training, once for
               validation, also with ramps and packed documents; where sizes do not change, they
               are constants
test_host      what forks, CUDA before a fork, the allocator's setting, sizes that fp8 and the ring
               refuse

`make gpu-path` runs the same with the build of torch for CUDA. There the dispatcher says which
operators have a kernel; the CPU build goes by native_functions.yaml.

Not told without a GPU: what a kernel computes, which one scaled_dot_product_attention takes,
flex_attention (capped scores), streams (both offloads, FSDP's own), whether NCCL connects, memory,
time.
"""
