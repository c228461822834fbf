# Tiny Shakespeare by characters, with knowledge distillation. First train four teachers, with
# SEED = 1, 2, 3 and 4, then the model:
#
#     PRESETS="config/shakespeare_char_fast.py config/shakespeare_char_distill.py"
#     python train.py $PRESETS --teachers= --n_layer=4 --max_iters=1000 --seed=SEED \
#         --out_dir=out-teacher-SEED
#     python train.py $PRESETS
#
# On two CPU cores, this takes about an hour in total. docs/lab-notebook.md has the losses.

out_dir = "out-shakespeare-char-distill"
teachers = "out-teacher-1,out-teacher-2,out-teacher-3,out-teacher-4"

n_layer = 5  # 11 M parameters
n_head = 4
n_embd = 256
max_iters = 1500
eval_interval = 150
