# A bigram model, the first model of most tutorials: without layers, each character is predicted
# from the previous one alone. Prepare the data first: python prepare.py
#
# It ends at a validation loss of 2.4813. With --position=learned, it adds position embeddings and
# ends at 2.4819: contexts start anywhere, so a position says nothing about the next character.

out_dir = "out-bigram"
dataset = "shakespeare_char"
eval_interval = 1000
eval_iters = 218  # the whole validation split
log_interval = 100

n_layer = 0
n_head = 1
n_embd = 64
tie_weights = False  # separate tables for input and output
position = "rotary"  # applies to attention only, so there is no position information
block_size = 32
batch_size = 16
gradient_accumulation_steps = 1

learning_rate = 1e-3
max_iters = 10_000
warmup_iters = 100
