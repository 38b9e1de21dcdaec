"""Training scripts that other people wrote: where they are, and how to make them short.

Scripts run unchanged. Options only make them smaller, and the data is written by
third_party_data.py, so nothing is downloaded.
"""

from __future__ import annotations

import dataclasses

COMMITS = {
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "karpathy/llama2.c": "350e04fe35433e6d2941dce5a1f53308f87058eb",
    "karpathy/makemore": "988aa59e4d8fefa526d06f3b453ad116258398d4",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    "vwxyzjn/cleanrl": "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    "jingyaogong/minimind": "d65ef2c00ebc6082f9df11541e1b191655eddb00",
    "huggingface/accelerate": "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
    "huggingface/evaluate": "a7dd338386a4fae9a1767e05eb9ef9479513d9e8",
    "Lightning-AI/pytorch-lightning": "7f0c3436cd3f6ad3753125672024fc415cbcb414",
    "huggingface/peft": "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40",
    "huggingface/trl": "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
    "huggingface/diffusers": "58eb52c0803ea9af3abec60841c2a093bdf1f951",
    "huggingface/pytorch-image-models": "aa4b5850c1543fa488abf260f18390eda46cf85d",
    "pyg-team/pytorch_geometric": "5c6461b2305ad068a6d61165b3c55852a11aaa41",
    "huggingface/sentence-transformers": "cad211983f36ce458e9b3360f3e11b29fc54cbd8",
    "yunjey/pytorch-tutorial": "0500d3df5a2a8080ccfccbc00aca0eacc21818db",
    "eriklindernoren/PyTorch-GAN": "36d3c77e5ff20ebe0aeefd322326a134a279b93e",
    "tanelp/tiny-diffusion": "726b6bbbf2c9e3d23dff9eaea2fda10d0af6a78c",
    "lucidrains/denoising-diffusion-pytorch": "faed4db28e724735323fa91c70aa9b28a6e1cbac",
    "pytorch/functorch": "d1126fb7d96db1755e8e832a7acf9059248f8c12",
    "optuna/optuna-examples": "2e0b10bc54501e801687e114de3cbe1b6d2407dc",
    "davidmrau/mixture-of-experts": "f662999727109357c42074997e9a6cd72806f668",
    "facebookresearch/dlrm": "090956ee2319ddd349a42232958aefccfe3f7b0a",
}
"""The commits that were run, by repository. `evaluate` only provides a metric."""


@dataclasses.dataclass(frozen=True)
class Script:
    """A script and its arguments.

    {repositories} and {data} stand for the folders of the checkouts and of the data. Other paths
    are relative to the folder of the run.
    """

    name: str
    repository: str
    path: str
    """The script, relative to its checkout. {data} stands for a script that third_party_data.py wrote."""
    arguments: str = ""
    ranks: int = 1
    """More than one rank is started by torchrun."""
    copies: tuple[tuple[str, str], ...] = ()
    """Files and folders to copy before the start: source pattern and target folder."""
    links: tuple[tuple[str, str], ...] = ()
    """Links to create before the start: what they point to, and where they are."""
    folders: tuple[str, ...] = ()
    """Folders to create before the start."""
    prepare: tuple[str, ...] = ()
    """Scripts of the repository that write the data, relative to the folder of the run."""
    folder: str = "."
    """The current folder of the script, relative to the folder of the run."""
    environment: tuple[tuple[str, str], ...] = ()
    stop_after_s: float = 0.0
    """Time after which an endless script gets Ctrl-C; 0 if the script ends by itself."""
    passes: str = r"$^"
    """Regular expression for functions of the script that only evaluate, sample or generate."""


_EXAMPLES, _LIGHTNING = "pytorch/examples", "Lightning-AI/pytorch-lightning"
_ACCELERATE, _TRL = "huggingface/accelerate", "huggingface/trl"
_GAN = "eriklindernoren/PyTorch-GAN"
_GLUE = (
    ("{data}/hugging_face/bert-base-cased", "."),
    ("{data}/hugging_face/nyu-mll", "."),
    ("{repositories}/evaluate/metrics/glue", "."),
)
_TRL_ARGUMENTS = (
    "--model_name_or_path tinyllama --per_device_train_batch_size 2 --gradient_accumulation_steps 2"
    " --output_dir out --use_cpu --logging_steps 5 --report_to none --bf16 False --seed 1"
    " --dtype float32 --max_steps 60"
)
_MNIST = (("{data}/MNIST", "data/MNIST"),)
_LIGHTNING_MNIST = (("{data}/MNIST", "{repositories}/pytorch-lightning/Datasets/MNIST"),)
_TINYLLAMA = ("{data}/hugging_face/tinyllama", ".")
_SMALL_GPT = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=5"
    " --eval_interval=50 --log_interval=10 --block_size=64 --batch_size=8 --n_layer=3 --n_head=4"
    " --n_embd=96 --max_iters=150 --lr_decay_iters=150 --dropout=0.0"
)
_SMALL_LLAMA = (
    "--device=cpu --compile=False --dtype=float32 --eval_iters=3 --eval_interval=40"
    " --log_interval=10 --max_seq_len=64 --batch_size=2 --dim=64 --n_layers=3 --n_heads=4"
    " --n_kv_heads=4 --vocab_source=llama2 --vocab_size=32000 --gradient_accumulation_steps=2"
    " --max_iters=120 --always_save_checkpoint=True"
)
_SMALL_MINIMIND = (
    "--data_path {data}/text/pretrain.jsonl --epochs 1 --batch_size 8 --accumulation_steps 2"
    " --hidden_size 128 --num_hidden_layers 4 --max_seq_len 96 --num_workers 1"
    " --log_interval 10 --save_interval 40 --dtype bfloat16"
)
_MINIMIND_TOKENIZER = (("{repositories}/minimind/model/tok*", "model"),)

SCRIPTS = (
    Script(
        "mnist",
        _EXAMPLES,
        "mnist/main.py",
        "--epochs 2 --seed 1 --log-interval 5",
        links=_MNIST,
        folder="run",
        passes="test$",
    ),
    Script(
        "mnist_rnn",
        _EXAMPLES,
        "mnist_rnn/main.py",
        "--epochs 3 --seed 1",
        links=_MNIST,
        folder="run",
        passes="test$",
    ),
    Script(
        "mnist_forward_forward",
        _EXAMPLES,
        "mnist_forward_forward/main.py",
        "--epochs 60 --train_size 600 --test_size 200",
        links=_MNIST,
        passes="predict$",
    ),
    Script(
        "vae",
        _EXAMPLES,
        "vae/main.py",
        "--epochs 4",
        links=_MNIST,
        folders=("run/results",),
        folder="run",
        passes="test$",
    ),
    Script(
        "dcgan",
        _EXAMPLES,
        "dcgan/main.py",
        "--dataset fake --niter 1 --ngf 16 --ndf 16 --batchSize 16 --workers 1 --manualSeed 1",
    ),
    Script(
        "siamese",
        _EXAMPLES,
        "siamese_network/main.py",
        "--epochs 1 --batch-size 16 --test-batch-size 100",
        links=(("{data}/small/MNIST", "data/MNIST"),),
        folder="run",
        passes="test$",
    ),
    Script(
        "word_language_model",
        _EXAMPLES,
        "word_language_model/main.py",
        "--epochs 3 --emsize 64 --nhid 64 --log-interval 10 --data {data}/wikitext-2",
        passes="evaluate$",
    ),
    Script(
        "imagenet",
        _EXAMPLES,
        "imagenet/main.py",
        "{data}/images -a resnet18 -b 8 -j 2 --epochs 2 --seed 1 -p 5",
        passes="validate$",
    ),
    Script(
        "actor_critic",
        _EXAMPLES,
        "reinforcement_learning/actor_critic.py",
        stop_after_s=25,
        passes="select_action$",
    ),
    Script("regression", _EXAMPLES, "regression/main.py", stop_after_s=25),
    Script(
        "time_sequence",
        _EXAMPLES,
        "time_sequence_prediction/train.py",
        "--steps 3",
        prepare=("{repositories}/examples/time_sequence_prediction/generate_sine_wave.py",),
        environment=(("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1"),),
    ),
    Script(
        "nanogpt",
        "karpathy/nanoGPT",
        "train.py",
        _SMALL_GPT,
        copies=(
            ("{repositories}/nanoGPT/*", "."),
            ("{data}/text/input.txt", "data/shakespeare_char"),
        ),
        prepare=("data/shakespeare_char/prepare.py",),
        passes="estimate_loss$",
    ),
    Script(
        "llama2.c",
        "karpathy/llama2.c",
        "train.py",
        _SMALL_LLAMA,
        copies=(("{repositories}/llama2.c/*.py", "."), ("{data}/TinyStories_all_data", "data")),
        passes="estimate_loss$",
    ),
    Script(
        "makemore",
        "karpathy/makemore",
        "makemore.py",
        "--max-steps 1000 -n 1 --n-layer 2",
        copies=(("{repositories}/makemore/names.txt", "."),),
        passes="evaluate$|print_samples$",
    ),
    Script(
        "mingpt_adder",
        "karpathy/minGPT",
        "projects/adder/adder.py",
        "--trainer.max_iters=700 --trainer.num_workers=1",
        environment=(("PYTHONPATH", "{repositories}/minGPT"),),
        passes="eval_split$",
    ),
    Script(
        "cleanrl_dqn",
        "vwxyzjn/cleanrl",
        "cleanrl/dqn.py",
        "--total-timesteps 12000 --learning-starts 500",
        environment=(("PYTHONPATH", "{repositories}/cleanrl"),),
    ),
    Script(
        "cleanrl_ppo",
        "vwxyzjn/cleanrl",
        "cleanrl/ppo.py",
        "--total-timesteps 20480",
        environment=(("PYTHONPATH", "{repositories}/cleanrl"),),
    ),
    Script(
        "cleanrl_sac",
        "vwxyzjn/cleanrl",
        "cleanrl/sac_continuous_action.py",
        "--env-id Pendulum-v1 --total-timesteps 198 --learning-starts 20",
        environment=(("PYTHONPATH", "{repositories}/cleanrl"),),
    ),
    Script(
        "minimind",
        "jingyaogong/minimind",
        "trainer/train_pretrain.py",
        _SMALL_MINIMIND,
        copies=_MINIMIND_TOKENIZER,
        folders=("out", "checkpoints"),
        folder="run",
    ),
    Script("accelerate_nlp", _ACCELERATE, "examples/nlp_example.py", "--cpu", copies=_GLUE),
    Script(
        "accelerate_accumulation",
        _ACCELERATE,
        "examples/by_feature/gradient_accumulation.py",
        "--cpu --gradient_accumulation_steps 2",
        ranks=2,
        copies=_GLUE,
    ),
    Script(
        "accelerate_local_sgd",
        _ACCELERATE,
        "examples/by_feature/local_sgd.py",
        "--cpu --local_sgd_steps 4",
        ranks=2,
        copies=_GLUE,
    ),
    Script(
        "lightning_autoencoder",
        _LIGHTNING,
        "examples/pytorch/basics/autoencoder.py",
        "--trainer.max_epochs=2 --trainer.limit_train_batches=150 --trainer.limit_val_batches=20"
        " --trainer.accelerator=cpu",
        links=(
            *_MNIST,
            ("{data}/whole/MNIST", "{repositories}/pytorch-lightning/examples/Datasets/MNIST"),
        ),
        passes="validation_step$|on_train_epoch_end$|run_evaluation$",
    ),
    Script(
        "fabric_ppo",
        _LIGHTNING,
        "examples/fabric/reinforcement_learning/train_fabric.py",
        "--total-timesteps 6144 --num-envs 2 --num-steps 128",
    ),
    Script(
        "fabric_images",
        _LIGHTNING,
        "examples/fabric/image_classifier/train_fabric.py",
        "--epochs 2 --batch-size 64",
        ranks=2,
        links=_LIGHTNING_MNIST,
        environment=(
            ("LT_CLI_USED", "1"),
            ("LT_ACCELERATOR", "cpu"),
            ("LT_DEVICES", "2"),
            ("LT_STRATEGY", "ddp"),
        ),
    ),
    Script(
        "fabric_kfold",
        _LIGHTNING,
        "examples/fabric/kfold_cv/train_fabric.py",
        "--epochs 1 --folds 3 --batch-size 64",
        links=_LIGHTNING_MNIST,
        passes="validate_dataloader$",
    ),
    Script(
        "peft_olora",
        "huggingface/peft",
        "examples/olora_finetuning/olora_finetuning.py",
        "--base_model tinyllama --data_path alpaca --output_dir out --batch_size 8 --num_epochs 2"
        " --cutoff_len 64 --val_set_size 40 --eval_step 20 --save_step 20 --device_map cpu"
        " --dtype float32",
        copies=(_TINYLLAMA, ("{data}/hugging_face/alpaca", ".")),
        passes="evaluation_loop$",
    ),
    Script(
        "trl_sft",
        _TRL,
        "trl/scripts/sft.py",
        f"--dataset_name chats --eval_strategy steps --eval_steps 20 {_TRL_ARGUMENTS}",
        ranks=2,
        copies=(_TINYLLAMA, ("{data}/hugging_face/chats", ".")),
        passes="evaluation_loop$",
    ),
    Script(
        "trl_dpo",
        _TRL,
        "trl/scripts/dpo.py",
        f"--dataset_name preferences {_TRL_ARGUMENTS}",
        copies=(_TINYLLAMA, ("{data}/hugging_face/preferences", ".")),
    ),
    Script(
        "trl_grpo",
        _TRL,
        "trl/scripts/grpo.py",
        "--dataset_name prompts --reward_funcs think_format_reward --num_generations 4"
        f" --max_completion_length 24 {_TRL_ARGUMENTS} --per_device_train_batch_size 4",
        copies=(_TINYLLAMA, ("{data}/hugging_face/prompts", ".")),
        passes="generate$",
    ),
    Script(
        "diffusers_unconditional",
        "huggingface/diffusers",
        "examples/unconditional_image_generation/train_unconditional.py",
        "--train_data_dir {data}/flat/train --model_config_name_or_path unet --resolution 32"
        " --train_batch_size 4 --num_epochs 4 --output_dir out --ddpm_num_inference_steps 4"
        " --eval_batch_size 4 --use_ema --save_images_epochs 2 --save_model_epochs 2"
        " --dataloader_num_workers 1 --logger tensorboard",
        ranks=2,
        copies=(("{data}/hugging_face/unet", "."),),
        environment=(("ACCELERATE_USE_CPU", "true"),),
    ),
    Script(
        "timm",
        "huggingface/pytorch-image-models",
        "train.py",
        "{data}/images --train-split train --val-split val --model resnet10t --num-classes 4"
        " --img-size 64 -b 8 -j 2 --epochs 3 --warmup-epochs 0 --device cpu --seed 1 --model-ema"
        " --log-interval 5 --checkpoint-hist 1",
        passes="validate$",
    ),
    Script(
        "pyg_explainer",
        "pyg-team/pytorch_geometric",
        "examples/explain/gnn_explainer_ba_shapes.py",
        stop_after_s=25,
    ),
    Script(
        "sentence_transformers",
        "huggingface/sentence-transformers",
        "examples/sentence_transformer/training/sts/training_stsbenchmark.py",
        copies=(
            ("{data}/hugging_face/distilbert", "."),
            ("{data}/hugging_face/sentence-transformers", "."),
        ),
        passes="evaluation_loop$|evaluate$",
    ),
    Script(
        "birnn",
        "yunjey/pytorch-tutorial",
        "tutorials/02-intermediate/bidirectional_recurrent_neural_network/main.py",
        links=_MNIST,
        folder="a/b",
    ),
    Script(
        "wgan_gp",
        _GAN,
        "implementations/wgan_gp/wgan_gp.py",
        "--n_epochs 6 --sample_interval 100",
        links=(("{data}/MNIST", "data/mnist/MNIST"),),
        folder="a/b",
    ),
    Script(
        "infogan",
        _GAN,
        "implementations/infogan/infogan.py",
        "--n_epochs 1 --batch_size 32 --sample_interval 50",
        links=(("{data}/MNIST", "data/mnist/MNIST"),),
        folder="a/b",
        passes="sample_image$",
    ),
    Script(
        "tiny_diffusion",
        "tanelp/tiny-diffusion",
        "ddpm.py",
        "--dataset circle --num_epochs 12",
        passes="NoiseScheduler.step$",
    ),
    Script(
        "denoising_diffusion",
        "lucidrains/denoising-diffusion-pytorch",
        "{data}/scripts/denoising_diffusion.py",
        "{data}/flat/train",
        environment=(("PYTHONPATH", "{repositories}/denoising-diffusion-pytorch"),),
        passes="sample$",
    ),
    Script(
        "maml_regression",
        "pytorch/functorch",
        "examples/maml_regression/evjang.py",
        stop_after_s=40,
    ),
    Script(
        "optuna",
        "optuna/optuna-examples",
        "pytorch/pytorch_simple.py",
        links=(("{data}/MNIST", "FashionMNIST"),),
        stop_after_s=60,
    ),
    Script(
        "mixture_of_experts",
        "davidmrau/mixture-of-experts",
        "cifar10_example.py",
        links=(("{data}/cifar-10-batches-py", "data/cifar-10-batches-py"),),
        environment=(("PYTHONPATH", "{data}/patches"),),
    ),
    Script(
        "minimind_moe",
        "jingyaogong/minimind",
        "trainer/train_pretrain.py",
        f"{_SMALL_MINIMIND} --use_moe 1",
        copies=_MINIMIND_TOKENIZER,
        folders=("out", "checkpoints"),
        folder="run",
    ),
    Script(
        "dlrm",
        "facebookresearch/dlrm",
        "dlrm_s_pytorch.py",
        "--mini-batch-size 128 --num-batches 200 --arch-embedding-size 1000-1000-1000-1000"
        " --arch-sparse-feature-size 16 --arch-mlp-bot 13-64-16 --arch-mlp-top 64-1"
        " --print-freq 20 --dist-backend gloo",
        ranks=2,
    ),
    Script(
        "gcn",
        "pyg-team/pytorch_geometric",
        "examples/gcn.py",
        links=(
            (
                "{data}/planetoid/Cora/raw",
                "{repositories}/pytorch_geometric/data/Planetoid/Cora/raw",
            ),
        ),
        passes="test$",
    ),
)
