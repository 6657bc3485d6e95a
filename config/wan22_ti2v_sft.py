# Wan2.2-TI2V-5B on the robot views, RGB, LoRA rank 64: one transformer, the first latent frame given clean.
# Cells are multiples of 32 (VAE stride 16, patches of 2): 448 x 384, 21 x 28 x 48 latents, 7,056 tokens a clip.
base = "robocasa_i2v.py"
model = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
cache_dir = "out/cache_robocasa_ti2v"
out_dir = "out/robocasa_ti2v"
pointmaps = False
cell_height = 448
lora_targets = "to_q,to_k,to_v,to_out.0,ffn.net.0.proj,ffn.net.2"
batch_size = 2
guidance_scale = 5.0
guidance_scale_2 = 5.0
