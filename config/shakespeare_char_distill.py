# Tiny Shakespeare by characters, with knowledge distillation. First train four teachers, with
# SEED = 1, 2, 3 and 4, then the model. On one CPU core, this takes about 40 minutes in total:
#
#     python train.py config/shakespeare_char_fast.py --device=cpu --seed=SEED \
#         --out_dir=out-teacher-SEED
#     python train.py config/shakespeare_char_fast.py config/shakespeare_char_distill.py
#
# These settings are those of shakespeare_char_fast.py for a GPU, except for the temperature. The
# validation loss is 1.376 (median of three seeds), and 1.387 without teachers.

out_dir = "out-shakespeare-char-distill"
teachers = "out-teacher-1,out-teacher-2,out-teacher-3,out-teacher-4"
train_temperature = 0.9

n_layer = 4
n_head = 4
n_embd = 256
ngrams = 3
batch_size = 4
dropout = 0.1
learning_rate = 6e-3
max_iters = 1800
eval_interval = 180
