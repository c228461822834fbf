# The smallest GPT-2 as textbooks build it: 163 million parameters instead of GPT-2's 124 million,
# because the output head does not share the token embedding. Prepare the data first:
#
#     python prepare.py
#     python prepare.py --dataset=shakespeare_gpt2 --input=data/shakespeare_char/input.txt \
#         --tokenizer=gpt2
#
# Tiny Shakespeare is far too small for it; this shows that the model fits and runs.

out_dir = "out-gpt2-124m"
dataset = "shakespeare_gpt2"
eval_interval = 100
eval_iters = 20
log_interval = 1

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
dropout = 0.1
bias = False
tie_weights = False
batch_size = 2
gradient_accumulation_steps = 1

learning_rate = 4e-4
max_iters = 1000
warmup_iters = 20
