# The final GPT of the lecture "Let's build GPT": 10.8 million parameters, minutes on a GPU, a day
# on two CPU cores. Prepare the data first: python prepare.py

out_dir = "out-lecture"
dataset = "shakespeare_char"
eval_interval = 500
log_interval = 10

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
batch_size = 64
gradient_accumulation_steps = 1
dropout = 0.2
bias = True
activation = "relu"
tie_weights = False

learning_rate = 3e-4
max_iters = 5000
warmup_iters = 100
