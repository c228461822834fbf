# A GPT with 0.31 million parameters, which tutorials train after the bigram model, on any CPU.
# Prepare the data first: python prepare.py

out_dir = "out-gpt-small"
dataset = "shakespeare_char"
eval_interval = 1000  # as in the curve that docs/tutorial.ipynb compares with
eval_iters = 218  # the whole validation split
log_interval = 100

n_layer = 6
n_head = 8
n_embd = 64
block_size = 32
batch_size = 16
gradient_accumulation_steps = 1
dropout = 0.1
bias = True
activation = "relu"
tie_weights = False

learning_rate = 1e-3
max_iters = 10_000
warmup_iters = 100
beta2 = 0.99  # a longer average, because a step has only 512 tokens
