# A bigram model, the first model of most tutorials: without layers, each character is predicted
# from the previous one alone. Prepare the data first: python prepare.py

out_dir = "out-bigram"
dataset = "shakespeare_char"
eval_interval = 500
eval_iters = 200
log_interval = 100

n_layer = 0
n_head = 1
n_embd = 64
tie_weights = False  # separate tables for input and output
position = "rotary"  # applies to attention only, so there is no position information
block_size = 8
batch_size = 32
gradient_accumulation_steps = 1

learning_rate = 1e-2
max_iters = 3000
warmup_iters = 100
