// Reads questions: the site's search wants every word of a question in one section, so words that say nothing are
// left out, other words for the same become those of our pages, and if nothing is found, one word is enough.
"use strict";

(() => {
  const EMPTY =
    "how do does did can could should would what why is are i we you me my a an the of to in on for with use it";
  const ASKING = new RegExp(`\\b(${EMPTY.replaceAll(" ", "|")})\\b`, "gi");
  const ASKING_ZH =
    /如何|怎么样?|怎样|为什么|为何|是什么|什么是|什么|哪种|哪个|多少|需要|应该|使用|请问|我|的|吗|呢|要|用|？|\?/g;
  // what is asked -> the words of our titles
  const WORDS = [
    [/\b(installation|installing|installed|setup|set up|pip|get started|getting started|quick ?start)\b/gi, "install"],
    [/\b(grouped[- ]query|multi[- ]query|grouped queries)( attention)?\b/gi, "gqa"],
    [/\b(multi[- ]head )?latent attention\b/gi, "mla"],
    [/\b(key[- ]value cache|kv[- ]?cache)\b/gi, "cache"],
    [/\b(sqrt|square root)\b/gi, "root"],
    [/\b(rope|rotary)( position(al)?)?( encodings?| embeddings?)?\b/gi, "turned rope"],
    [/\bposition(al)?( encodings?| embeddings?)\b/gi, "positions"],
    [/^\W*(what is |explain )?softmax\W*$/i, "products softmax"],
    [/\bsliding[- ]windows?( attention)?\b/gi, "windows"],
    [/\b(gpu memory|vram|price|memory usage|flops)\b/gi, "cost"],
    [/\b(visuali[sz]e|visuali[sz]ation|heat ?maps?)\b/gi, "view"],
    [/\b(hugging ?face|hf)\b/gi, "transformers"],
    [/\b(quanti[sz]ation|quanti[sz]ed?|int4|int8|4[- ]bit|8[- ]bit)\b/gi, "weights"],
    [/\b(yarn|long[- ]contexts?|context extension|extrapolation)\b/gi, "long contexts"],
    [/\b(interpretability|activation patching|ablation|lens)\b/gi, "researcher"],
    [/\b(multi[- ]gpu|distributed|tensor parallel(ism)?|ring attention)\b/gi, "parallel"],
    [/\b(speed|faster|throughput|performance)\b/gi, "benchmarks"],
    [/\b(server|openai api|api server)\b/gi, "serve"],
    [/\bmulti[- ]head( attention)?\b/gi, "heads"],
    [/(该|应该)?(用|选|选择|使用)(哪种|哪个|什么)(注意力)?(机制)?/g, "该选注意力"],
    [/根号|开方|平方根/g, "平方根"],
    [/多查询注意力|分组查询注意力|分组查询/g, "gqa"],
    [/潜在注意力|潜向量注意力|潜注意力/g, "mla"],
    [/键值缓存|KV ?缓存/gi, "缓存"],
    [/装上|装好|部署环境/g, "安装"],
    [/旋转位置编码|位置编码|位置嵌入/g, "位置"],
    [/滑动窗口/g, "窗口"],
    [/显存|内存占用|开销/g, "成本"],
    [/可视化|热力图/g, "查看"],
    [/多卡|分布式/g, "并行"],
    [/遮罩|遮蔽/g, "掩码"],
    [/长文本|超长上下文/g, "长上下文"],
    [/量化/g, "权重"],
    [/性能测试|速度/g, "性能"],
  ];
  const asked = text => {
    const ours = WORDS.reduce((words, [other, word]) => words.replace(other, ` ${word} `), text);
    const words = ours.replace(ASKING, " ").replace(ASKING_ZH, " ").replace(/\s+/g, " ").trim();
    return words || text;
  };

  const answer = self.onmessage;
  const post = self.postMessage.bind(self);
  let query = null;
  self.postMessage = message => {
    const words = query?.words.split(" ") ?? [];
    const found = message.type !== 3 || message.data.items.length > 0 || query.page;
    if (found || words.length < 2 || query.again) return post(message);
    query.again = true; // no section has all words: the sections that have one, the most fitting first
    const operands = words.map(word => ({
      type: "value",
      data: { field: "*", value: { type: "prefix", data: word } },
    }));
    answer({
      data: { type: 2, data: { ...query.data, input: { type: "operator", data: { operator: "or", operands } } } },
    });
  };
  self.onmessage = ({ data }) => {
    if (data.type !== 2 || typeof data.data.input !== "string") return answer({ data });
    const words = asked(data.data.input);
    query = { words, data: data.data, page: data.data.page };
    answer({ data: { ...data, data: { ...data.data, input: words } } });
  };
})();
