# The shape of the smallest GPT-2 as books build it: 163 million parameters, since the head has
# weights of its own, where GPT-2 shares them with the embedding and has 124. For byte pairs:
#
#     python prepare.py
#     python prepare.py --dataset=shakespeare_gpt2 --input=data/shakespeare_char/input.txt \
#         --tokenizer=gpt2
#
# Shakespeare is far too short for it; this shows that it fits and runs, not what it could learn.

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
