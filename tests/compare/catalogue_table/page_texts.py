"""The sentences of the page that compares all mechanisms, in both languages."""

HEADS = (
    ("mechanism", "机制"),
    ("kind", "种类"),
    ("result", "结果"),
    ("beyond training length", "超出训练长度"),
    ("cache per token, KiB", "每词元缓存，KiB"),
    ("state, MiB", "状态，MiB"),
    ("all caches, MiB", "全部缓存，MiB"),
    ("prompt, TFLOP", "提示，TFLOP"),
    ("token, GFLOP", "词元，GFLOP"),
    ("prompt, ms", "提示，毫秒"),
    ("token, ms", "词元，毫秒"),
    ("who ships it", "谁在使用"),
)
QUALITY_HEADS = (
    ("mechanism", "机制"),
    ("mqar, % right", "mqar，正确率 %"),
    ("passkey, % right", "passkey，正确率 %"),
    ("text, bits per byte", "文本，每字节比特"),
)

ENGLISH = """# Mechanisms compared: all of them in one table

This page puts the {count} mechanisms of the [catalogue](catalogue.md) side by side: what each computes, what becomes of it beyond its
training length, what it costs, how fast one layer runs here, and who ships it. A second table has the quality of the 20 most used ones at
equal parameters, in very small models. On the site, a click on the head of a column sorts a table.

A program writes both tables; the last section has its commands.

## 1. Every mechanism

| columns | meaning |
|---|---|
| result, beyond training length | the words are explained in section 2 |
| cache per token, state, all caches, FLOPs | counted for Llama 3.1 8B with this mechanism in all 32 layers: 4,096 wide, 32 query heads, 8 key heads where a mechanism shares them, a context of 32,768 tokens, a cache in bf16, and states in fp32. *Cache per token* is what one token adds, *all caches* is what the context takes in all; the second is smaller than 32,768 times the first where old tokens are dropped. *Prompt* is the whole context, *token* is the last one. Sizes are those of published models: `regard cost llama-3.1-8b --mechanisms NAME --context 32k` prints the same numbers for the mechanisms that it knows, and `regard describe NAME` counts one layer of the others |
| prompt, token in milliseconds | measured: one layer, {dim} wide, {heads} query heads and {groups} key heads, in fp32, on a prompt of {tokens} tokens and on the token at its end. Windows, budgets and selections hold a quarter of it. Median of {rounds} rounds, in which all mechanisms took turns. It is processor time of one thread, because the machine was busy with other work: differences below a third mean nothing |
| who ships it | public models, as `regard describe` prints them |

A dash means that there is no such number: the mechanism sees later tokens, so that it cannot decode. Attention to a second sequence
(`cross_attention`, `bahdanau`, `luong`) caches that sequence once, and a decoded token adds nothing. Prompts of recurrences are counted step
by step. `regard` runs some score rules only by the definition, which computes every pair: their times are those of the definition, not of the
mechanism.

{mechanisms}

Speeds: {speed_date}, {processor}, {cores} cores, one thread, Python {python}, torch {torch}.
Numbers with quartiles: [mechanisms-speed.jsonl](mechanisms-speed.jsonl).

## 2. What the words mean

What a mechanism computes:

{results}

What becomes of it beyond the length of its training, and what is lost:

{beyond}

## 3. Quality of the 20 most used, at equal parameters

Each number is the mean over {seeds} seeds, with the result of each seed in brackets. The mechanisms are those of the catalogue that most
released decoders have, in the order of their use; `mha` has rotary positions.

{quality}

How they were trained: `regard compare`'s own machinery (see [Mechanisms side by side](compare.md)), on {quality_date}. All models have 2
layers, are 64 wide, and have 4 query heads of width 16; mechanisms that share keys have 2 key heads. The width of the feed-forward layers is
chosen so that every model has as many parameters as `mha`, 139,584, within 1 %. A window, a chunk and a selection hold 8 tokens, and every
second layer of `local_global` and `irope` is the global one. The learning rate is 0.003 for all, with AdamW and the same batches.

| task | data | training |
|---|---|---|
| mqar | pairs of a key and a value, then keys whose values the model must give; rows of up to 16 tokens | 800 steps of 32 rows |
| passkey | a number in a text without meaning, which the model must repeat at the end; rows of up to 32 tokens | 500 steps of 16 rows |
| text | the bytes of Python's documentation | 300 steps of 4 rows of 128 bytes |

### What this shows, and what it does not

- **The scale is tiny**: 0.14 million parameters and a few hundred steps. Most of what the table shows is how quickly a mechanism learns a task
  at this size; some models that fail here would learn the task with more steps. The order says nothing about large models.
- **The seeds differ much**: the largest distance between two seeds of one mechanism is {mqar_spread} points in mqar, {passkey_spread} points in
  passkey, and {text_spread} bits per byte in text. A smaller difference between two mechanisms means nothing.
- **What can be read**: `mha` almost solves mqar and passkey, so the tasks can be learnt at this size. Where a
  mechanism cannot see the answer, because its window or chunk of 8 tokens has passed it, no training helps.
- **Text measures neighbours**: after 300 steps the models know frequent letters and endings. Mechanisms that look at near tokens first
  (windows, ALiBi, short convolutions, decays) learn these sooner, and lead; this is not a sign of better language models.
- **One learning rate for all** is not fair to all: recurrences are more sensitive to it than softmax attention. `regard compare` tries three
  rates for them; here one rate leaves time for more mechanisms.
- **Parts that act at scale do nothing here**: caps on scores (`softcap`) and sinks (`learned_sink`) were made for training at scale and for long texts; a difference between them and `gqa` is mostly one of seeds.

Every run with its settings and numbers: [mechanisms-quality.jsonl](mechanisms-quality.jsonl).

## 4. The commands

```sh
python -m tests.compare.catalogue_table speed      # times one layer of each mechanism, for minutes
python -m tests.compare.catalogue_table quality    # trains what is missing, for hours; Ctrl-C loses one run at most
python -m tests.compare.catalogue_table page       # writes this page in both languages
```

A test compares this page with what the program writes from the kept measurements, so that a new mechanism cannot be left out.
"""

CHINESE = """# 机制对比：一张表列出全部机制

[English](mechanisms.md) · **简体中文**

本页把[目录](catalogue.zh-CN.md)中的 {count} 种机制并排列出：每种机制计算什么，超出训练长度时会怎样，代价多少，一层在本机上有多快，以及谁在使用。
第二张表给出最常用的 20 种机制在参数量相同的极小模型中的质量。在网站上，点击列标题可以排序。

两张表都由程序写出；命令见最后一节。

## 1. 每一种机制

| 列 | 含义 |
|---|---|
| 结果、超出训练长度 | 用语的含义见第 2 节 |
| 每词元缓存、状态、全部缓存、FLOP | 按 Llama 3.1 8B 计算，32 层全部换成该机制：宽 4,096，32 个查询头，共享键的机制有 8 个键头，上下文 32,768 个词元，缓存用 bf16，状态用 fp32。*每词元缓存*是一个词元增加的量，*全部缓存*是整个上下文占用的量；丢弃旧词元的机制，后者小于前者的 32,768 倍。*提示*是整个上下文，*词元*是最后一个。大小取自公开的模型：对于 `regard cost` 认识的机制，`regard cost llama-3.1-8b --mechanisms NAME --context 32k` 打印相同的数；`regard describe NAME` 计算其余机制的一层 |
| 以毫秒计的提示、词元 | 实测：一层，宽 {dim}，{heads} 个查询头，{groups} 个键头，fp32，提示有 {tokens} 个词元，再测其末尾的词元。窗口、预算和选择都是它的四分之一。取 {rounds} 轮的中位数，各机制轮流进行。计的是单线程的处理器时间，因为机器同时在做别的工作：小于三分之一的差别没有意义 |
| 谁在使用 | 公开的模型，与 `regard describe` 打印的相同 |

短横线表示没有这个数：该机制能看到后面的词元，因此不能逐词元解码。关注第二个序列的机制（`cross_attention`、`bahdanau`、`luong`）只缓存该序列一次，
解码的词元不再增加缓存。循环机制的提示按逐步计算计数。有些分数规则在 `regard` 中只按定义运行，即计算每一对：它们的时间是定义的时间，不是机制本身的时间。

{mechanisms}

速度：{speed_date}，{processor}，{cores} 核，单线程，Python {python}，torch {torch}。
带四分位数的数据：[mechanisms-speed.jsonl](mechanisms-speed.jsonl)。

## 2. 用语的含义

机制计算什么：

{results}

超出训练长度时会怎样，会失去什么：

{beyond}

## 3. 最常用的 20 种机制在参数量相同时的质量

每个数是 {seeds} 个种子的平均值，括号里是每个种子的结果。这些是目录中被最多已发布解码器采用的机制，按使用程度排列；`mha` 带有旋转位置。

{quality}

训练方法：使用 `regard compare` 自身的程序（见[机制并排比较](compare.zh-CN.md)），日期 {quality_date}。所有模型都有 2 层，宽 64，4 个宽 16 的查询头；
共享键的机制有 2 个键头。前馈层的宽度使每个模型的参数量与 `mha` 的 139,584 相差不超过 1 %。窗口、块和选择都是 8 个词元，
`local_global` 和 `irope` 每两层有一个全局层。学习率都是 0.003，用 AdamW，批次相同。

| 任务 | 数据 | 训练 |
|---|---|---|
| mqar | 若干键值对，然后给出键，模型必须给出值；每行最多 16 个词元 | 800 步，每步 32 行 |
| passkey | 无意义文本中的一个数，模型必须在末尾复述；每行最多 32 个词元 | 500 步，每步 16 行 |
| text | Python 文档的字节 | 300 步，每步 4 行，每行 128 字节 |

### 它能说明什么，不能说明什么

- **规模极小**：14 万个参数，几百步。表中大多反映的是机制在这个规模上学会任务的快慢；有些在这里失败的模型，步数更多时能学会。名次对大模型没有任何意义。
- **种子之间差别很大**：同一机制的两个种子之间，最大差距在 mqar 是 {mqar_spread} 个百分点，在 passkey 是 {passkey_spread} 个百分点，在文本是每字节 {text_spread} 比特。
  两种机制之间更小的差别没有意义。
- **能读出的**：`mha` 几乎解决了 mqar 和 passkey，可见在这个规模上任务是学得会的。如果机制看不到答案，因为它的 8 个词元的窗口或块已经过去，
  任何训练都没有用。
- **文本衡量的是邻近**：300 步之后，模型只知道常见的字母和词尾。先看邻近词元的机制（窗口、ALiBi、短卷积、衰减）学得更早，因而领先；这不表示它们是更好的语言模型。
- **共用一个学习率**并不对所有机制公平：循环机制比 softmax 注意力更敏感。`regard compare` 为它们试三个学习率；这里只用一个，以便有时间比较更多机制。
- **在大规模才起作用的部件在这里不起作用**：分数的上限（`softcap`）和汇点（`learned_sink`）是为大规模训练和长文本设计的；它们与 `gqa` 的差别主要是种子的差别。

每次运行的设置和数字：[mechanisms-quality.jsonl](mechanisms-quality.jsonl)。

## 4. 命令

```sh
python -m tests.compare.catalogue_table speed      # times one layer of each mechanism, for minutes
python -m tests.compare.catalogue_table quality    # trains what is missing, for hours; Ctrl-C loses one run at most
python -m tests.compare.catalogue_table page       # writes this page in both languages
```

有一项测试把本页与程序根据保存的测量写出的内容比较，因此不会漏掉新的机制。
"""

PAGE = (ENGLISH, CHINESE)
