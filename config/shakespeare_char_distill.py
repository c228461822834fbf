# Tiny Shakespeare by characters, with knowledge distillation. First train three teachers, with
# SEED = 1, 2 and 3, then the model. On two CPU cores, this takes about half an hour in total:
#
#     PRESETS="config/shakespeare_char_fast.py config/shakespeare_char_distill.py"
#     python train.py $PRESETS --teachers= --max_iters=1000 --seed=SEED --out_dir=out-teacher-SEED
#     python train.py $PRESETS
#
# The model is that of shakespeare_char_fast.py for a GPU. docs/lab-notebook.md has the losses.

out_dir = "out-shakespeare-char-distill"
teachers = "out-teacher-1,out-teacher-2,out-teacher-3"

n_layer = 4
n_head = 4
n_embd = 256
max_iters = 1500
eval_interval = 150
