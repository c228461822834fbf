# nanoGPT's recipe for finetuning GPT-2 on tiny Shakespeare.
# Prepare the data first: python prepare.py --dataset=shakespeare
#
# The largest GPT-2 needs 25 GB for weights, gradients and moments, and more for activations. The
# smaller ones are --init_from=gpt2, gpt2-medium and gpt2-large.

out_dir = "out-shakespeare"
dataset = "shakespeare"
init_from = "gpt2-xl"

eval_interval = 5
always_save_checkpoint = False  # keep the best state: the model soon memorizes so short a text

# 32 x 1,024 = 32,768 tokens per step; the training split has 301,966, so 20 steps read it twice
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20

learning_rate = 3e-5  # constant and small, because the weights are already good
decay_lr = False

wandb_project = "shakespeare"
wandb_run_name = "finetune"
