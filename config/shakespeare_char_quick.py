# shakespeare_char_fast.py in less than a minute: few steps learn most with a small model, and
# memorize little, so it needs less weight decay. Prepare the data first: python prepare.py

out_dir = "out-shakespeare-char-quick"
dataset = "shakespeare_char"
log_interval = 10

# 5.2 M parameters, 5.0 M of them in the tables of n-grams
n_layer = 1
n_head = 2
n_embd = 128
block_size = 1024
window = 64
ngrams = 6
ngram_rows = 49_157  # 0.008 compared with 32,771, for 4% more time
position = "rotary"
tie_weights = False
qk_norm = True
activation = "swiglu"

optimizer = "muon"
learning_rate = 6e-3
min_lr = 0.0
warmup_iters = 0
train_temperature = 0.9
weight_decay = 0.2
beta1 = 0.7
grad_clip = 0.0

batch_size = 4
gradient_accumulation_steps = 1
max_iters = 350
eval_interval = 70
