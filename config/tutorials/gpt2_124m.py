# The smallest GPT-2 as textbooks build it: 163 million parameters instead of GPT-2's 124 million,
# because the output head does not share the token embedding. Prepare the data first:
#
#     python prepare.py
#     python prepare.py --dataset=shakespeare_gpt2 --input=data/shakespeare_char/input.txt \
#         --tokenizer=gpt2
#
# Textbooks have biases in all linear layers except those of queries, keys and values, and in layer
# norms. These are 74,496 parameters: 4,608 per layer and 768 per norm. --bias=True adds them, and
# 27,648 for queries, keys and values. folio pads the vocabulary from 50,257 to 50,304, which is
# 72,192 parameters. So a textbook's model has 163,009,536 parameters and this one 163,007,232.
#
# Tiny Shakespeare is far too small for it; this shows that the model fits and runs.

out_dir = "out-gpt2-124m"
dataset = "shakespeare_gpt2"
eval_interval = 100
log_interval = 1

# n_layer, n_head, n_embd and block_size are GPT-2's by default.
dropout = 0.1
tie_weights = False
batch_size = 2
gradient_accumulation_steps = 1

learning_rate = 4e-4
max_iters = 1000
warmup_iters = 20
