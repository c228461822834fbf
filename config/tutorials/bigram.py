# The bigram model, with which the tutorials begin: no layers, so that each character is foretold
# from the one before it alone. First: python prepare.py

out_dir = "out-bigram"
dataset = "shakespeare_char"
eval_interval = 500
eval_iters = 200
log_interval = 100

n_layer = 0
n_head = 1
n_embd = 64
tie_weights = False  # one table for what a character is, one for what comes next
position = "rotary"  # which only attention knows of: without layers, nothing tells where one is
block_size = 8
batch_size = 32
gradient_accumulation_steps = 1

learning_rate = 1e-2
max_iters = 3000
warmup_iters = 100
