# nanoGPT's reproduction of the smallest GPT-2 (124 M parameters) on OpenWebText:
#
#     python prepare.py --dataset=openwebtext
#     torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
#
# It logs to Weights & Biases: run pip install wandb, or add --wandb_log=False.

out_dir = "out-gpt2"
dataset = "openwebtext"
wandb_log = True
wandb_run_name = "gpt2-124M"

# 12 x 1,024 x 40 = 491,520 tokens per step
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 40

# 300 billion tokens in total
max_iters = 600_000
lr_decay_iters = 600_000

eval_interval = 1000
log_interval = 10
