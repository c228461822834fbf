# The bigram model with position embeddings. Each prediction also depends on the character's
# position in the context, which says nothing about the next one, because contexts start anywhere.
# Only attention makes positions useful. Prepare the data first: python prepare.py
#
# It ends at a validation loss of 2.4819, bigram.py at 2.4813. Tutorials publish 2.4165.

out_dir = "out-bigram-positions"
dataset = "shakespeare_char"
eval_interval = 1000
eval_iters = 218  # the whole validation split
log_interval = 100

n_layer = 0
n_head = 1
n_embd = 64
tie_weights = False  # separate tables for input and output
position = "learned"
block_size = 32
batch_size = 16
gradient_accumulation_steps = 1

learning_rate = 1e-3
max_iters = 10_000
warmup_iters = 100
