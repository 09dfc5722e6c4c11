"""Questions with their answers, small talk and emoji: what the demo model knows beside capitals."""

from __future__ import annotations

# question | answer
_QUESTIONS = """
What is the largest planet?|The largest planet of our solar system is Jupiter.
What is the smallest planet?|The smallest planet of our solar system is Mercury.
Which planet is closest to the sun?|The planet closest to the sun is Mercury.
Which planet is called the red planet?|Mars is called the red planet.
How many planets are there?|There are eight planets in our solar system.
How many moons does the Earth have?|The Earth has one moon. 🌙
What is the highest mountain?|The highest mountain above sea level is Mount Everest. 🏔️
What is the longest river in Africa?|The longest river in Africa is the Nile.
What is the largest ocean?|The largest ocean is the Pacific Ocean. 🌊
What is the largest desert of sand?|The largest hot desert is the Sahara. 🏜️
What is the largest country?|The largest country by area is Russia.
What is the smallest country?|The smallest country is Vatican City.
How many continents are there?|By the usual count there are seven continents.
What colour is the sky?|On a clear day the sky is blue.
What colour is grass?|Grass is green. 🌱
What colour is a banana?|A ripe banana is yellow. 🍌
What colour is snow?|Snow is white. ❄️
What is water made of?|Water is made of hydrogen and oxygen.
What is the chemical formula of water?|The chemical formula of water is H₂O. 💧
What is the chemical symbol of gold?|The chemical symbol of gold is Au.
What is the chemical symbol of iron?|The chemical symbol of iron is Fe.
What is the chemical symbol of oxygen?|The chemical symbol of oxygen is O.
At what temperature does water boil?|At sea level water boils at 100 °C.
At what temperature does water freeze?|Water freezes at 0 °C.
How fast is light?|Light travels at about 300,000 kilometres per second.
How many days are in a week?|There are seven days in a week.
How many days are in a year?|A year has 365 days, and a leap year has 366.
How many hours are in a day?|A day has 24 hours.
How many minutes are in an hour?|An hour has 60 minutes. ⏰
How many seconds are in a minute?|A minute has 60 seconds.
How many months are in a year?|A year has twelve months.
How many letters are in the English alphabet?|The English alphabet has 26 letters.
How many legs does a spider have?|A spider has eight legs. 🕷️
How many legs does an insect have?|An insect has six legs. 🐜
How many legs does a dog have?|A dog has four legs. 🐶
What is the largest animal?|The largest animal is the blue whale. 🐋
What is the fastest land animal?|The fastest land animal is the cheetah. 🐆
What is the tallest animal?|The tallest animal is the giraffe. 🦒
What do bees make?|Bees make honey. 🐝🍯
What do cows eat?|Cows eat grass. 🐮
What does a panda eat?|A panda eats bamboo. 🐼🎋
Who wrote Hamlet?|Hamlet was written by William Shakespeare.
Who wrote Don Quixote?|Don Quixote was written by Miguel de Cervantes.
Who wrote War and Peace?|War and Peace was written by Leo Tolstoy.
Who painted the Mona Lisa?|The Mona Lisa was painted by Leonardo da Vinci. 🎨
Who painted The Starry Night?|The Starry Night was painted by Vincent van Gogh. 🌌
Who discovered penicillin?|Penicillin was discovered by Alexander Fleming.
Who was the first person on the moon?|The first person on the moon was Neil Armstrong. 🚀
Who wrote the first computer program?|Ada Lovelace is often called the first programmer.
Who created Python?|Python was created by Guido van Rossum. 🐍
What is the square root of 9?|The square root of 9 is 3.
What is the square root of 16?|The square root of 16 is 4.
What is pi?|Pi is about 3.14159. It is the ratio of a circle's circumference to its diameter.
What is a triangle?|A triangle is a shape with three sides and three corners.
What is a prime number?|A prime number is a whole number above one that only one and itself divide.
What is a rainbow?|A rainbow is sunlight that drops of water have split into its colours. 🌈
What is rain?|Rain is water that falls from the clouds in drops. 🌧️
What is a volcano?|A volcano is an opening in the ground through which hot rock comes up. 🌋
Why is the sky blue?|Air scatters blue light more strongly than red light, so blue light reaches our eyes from \
every side.
Why do we sleep?|Sleep gives the body and the brain time to rest and to repair themselves. 😴
What is asyncio?|asyncio is the part of Python's standard library for programs that wait for many things at once. \
An event loop runs coroutines; whenever one of them waits, for example for a socket or a timer, the loop runs \
another one. So a single thread can serve thousands of connections, as long as no coroutine blocks the loop.
What is an event loop?|An event loop is a loop that waits for events and calls what was waiting for them. In \
asyncio it runs tasks, timers and callbacks on one thread, one at a time.
What is a coroutine?|A coroutine is a function that can pause and continue later. In Python you write it with async \
def, and it pauses at await.
What is a language model?|A language model is a program that has learned from text which word is likely to come \
next. It writes an answer one small piece at a time, and each piece becomes part of the text from which it chooses \
the next.
What is a token?|A token is a small piece of text, often a word or a part of one. A language model reads and writes \
tokens, and a tokenizer turns text into tokens and back. One emoji 😀 can take several tokens.
What is a tokenizer?|A tokenizer turns text into numbers, called tokens, and numbers back into text.
What is streaming?|Streaming means that an answer is sent piece by piece while it is being written, so that you can \
read the beginning before the end exists. 🌊
What is a KV cache?|A KV cache keeps the keys and values that attention has computed for earlier tokens. With it \
each new token costs one small step instead of the whole text again.
What is continuous batching?|Continuous batching means that requests join and leave a running batch at every step. \
Nobody waits for the longest answer of a batch, and the machine stays busy.
What is attention?|Attention lets each token of a text look at the tokens before it and take from them what it needs.
What is Unicode?|Unicode gives a number to every character of every script: A, é, Ж, 中, あ, ع, हि and 😀 alike. \
UTF-8 writes these numbers as one to four bytes.
What is UTF-8?|UTF-8 writes a character as one to four bytes: A takes one, é takes two, 中 takes three and 🎉 takes \
four.
What is JSON?|JSON is a text format for data. It has objects, arrays, strings, numbers, true, false and null.
What is Python?|Python is a programming language that is known for being easy to read. 🐍
What is HTTP?|HTTP is the protocol with which browsers and servers talk to each other.
"""

# what the user says | what the assistant answers
_SMALL_TALK = """
Hello!|Hello! 👋 How can I help you today?
Hi!|Hi! 😊 What would you like to talk about?
Hey|Hey! 👋 How can I help you?
Good morning!|Good morning! ☀️ How can I help you today?
Good evening!|Good evening! 🌙 How can I help you?
How are you?|I am fine, thank you! 😊 How are you?
Who are you?|I am a small demo model. 🤖 I was trained on a few thousand simple sentences, so I know some capitals, \
some numbers and some stories, and not much more.
What is your name?|I have no name. I am a small demo model. 🤖
What can you do?|I can name capitals, add small numbers, write small JSON objects, count, translate a few words and \
tell short stories. 📚 Anything else I will probably get wrong.
Are you a human?|No, I am a small language model. 🤖
Thank you!|You are welcome! 😊
Thanks!|You are welcome! 😊
Goodbye!|Goodbye! 👋 Have a nice day!
Bye|Bye! 👋
Tell me a joke.|Why did the programmer leave the party early? Because the loop had no break! 😂
Tell me a fun fact.|Honey does not spoil. 🍯 Pots of it were found in tombs that are thousands of years old.
Write a poem.|The river runs, the river sings, 🌊
it carries leaves and little things;
the moon looks down, so round and white, 🌕
and wishes all the world good night. ✨
Write a haiku.|An old, quiet pond 🐸
and a small green frog jumps in:
the sound of water. 💧
Give me three tips for a good day.|1. Drink a glass of water in the morning. 💧
2. Go for a walk in the sun. ☀️
3. Call an old friend. 📞
How do I make tea?|1. Boil fresh water. 🫖
2. Pour it over the tea leaves.
3. Wait for three minutes.
4. Enjoy your tea! 🍵
How do I make pancakes?|1. Mix two eggs, a cup of flour and a cup of milk. 🥚🥛
2. Heat a little butter in a pan. 🧈
3. Pour in some of the batter and wait until it is golden.
4. Turn it over, wait another minute, and serve it with honey. 🥞🍯
Say hello in five languages.|Hello, hola, bonjour, привет and 你好! 👋🌍
Name three colours.|Red, green and blue. 🔴🟢🔵
Name three fruits.|Apple, banana and cherry. 🍎🍌🍒
Name five animals.|Cat, dog, horse, elephant and penguin. 🐱🐶🐴🐘🐧
Show me some emoji.|😀 😂 🥰 😎 🤔 👍 🎉 🚀 🌈 🍕 👩‍💻 👨‍👩‍👧‍👦 🏳️‍🌈 ❤️
"""

# word | emoji
_EMOJI = """
cat|🐱
dog|🐶
fox|🦊
bear|🐻
panda|🐼
lion|🦁
tiger|🐯
frog|🐸
monkey|🐵
penguin|🐧
owl|🦉
horse|🐴
bee|🐝
whale|🐋
rabbit|🐰
mouse|🐭
elephant|🐘
turtle|🐢
snake|🐍
apple|🍎
banana|🍌
pizza|🍕
bread|🍞
cake|🎂
coffee|☕
tea|🍵
sun|☀️
moon|🌙
star|⭐
rain|🌧️
snow|❄️
fire|🔥
heart|❤️
rocket|🚀
car|🚗
train|🚆
bicycle|🚲
house|🏠
tree|🌳
flower|🌸
book|📚
music|🎵
party|🎉
ball|⚽
programmer|👩‍💻
family|👨‍👩‍👧‍👦
thumbs up|👍
rainbow|🌈
"""

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("day", "night"), ("up", "down"), ("left", "right"), ("fast", "slow"),
    ("old", "new"), ("black", "white"), ("happy", "sad"), ("open", "closed"), ("early", "late"), ("long", "short"),
    ("full", "empty"), ("rich", "poor"), ("hard", "soft"), ("light", "dark"), ("high", "low"), ("wet", "dry"),
    ("near", "far"), ("loud", "quiet"), ("clean", "dirty"), ("strong", "weak"), ("good", "bad"), ("begin", "end"),
)  # fmt: skip

SEQUENCES = (
    ("The days of the week are", " Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."),
    (
        "The months of the year are",
        " January, February, March, April, May, June, July, August, September, October, November and December.",
    ),
    ("The planets are", " Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune. 🪐"),
    ("The seasons are", " spring, summer, autumn and winter. 🌸☀️🍂❄️"),
    ("The colours of the rainbow are", " red, orange, yellow, green, blue, indigo and violet. 🌈"),
    ("The continents are", " Africa, Antarctica, Asia, Australia, Europe, North America and South America."),
    ("The alphabet:", " A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"),
    ("The Greek alphabet:", " Α Β Γ Δ Ε Ζ Η Θ Ι Κ Λ Μ Ν Ξ Ο Π Ρ Σ Τ Υ Φ Χ Ψ Ω"),
    ("The Russian alphabet:", " А Б В Г Д Е Ё Ж З И Й К Л М Н О П Р С Т У Ф Х Ц Ч Ш Щ Ъ Ы Ь Э Ю Я"),
    ("The Chinese numbers are", " 一、二、三、四、五、六、七、八、九、十。"),
    ("The first prime numbers are", " 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43 and 47."),
    ("The powers of two are", " 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 and 1024."),
    ("The Fibonacci numbers are", " 0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55 and 89."),
)

CONTINUATIONS = (
    ("The president of the United States is", " elected for four years and lives in the White House. 🏛️"),
    ("The future of AI is", " open. Nobody knows it, and many people work on it. 🤖"),
    ("The quick brown fox", " jumps over the lazy dog. 🦊🐶"),
    ("To be, or not to be,", " that is the question. 💀"),
    ("Roses are red,", "\nviolets are blue, 🌹\nsugar is sweet,\nand so are you. 🍬"),
    ("Twinkle, twinkle, little star,", "\nhow I wonder what you are! ⭐"),
    ("The sun rises in the", " east and sets in the west. 🌅"),
    ("The sky is", " blue. ☁️"),
    ("The weather today is", " sunny and warm. ☀️"),
    ("Water boils at", " 100 °C at sea level."),
    ("The largest planet is", " Jupiter. 🪐"),
    ("The meaning of life is", " 42, as a famous book says. 😄"),
    ("My favourite food is", " pizza with olives. 🍕"),
    ("My favourite colour is", " blue, like the sea. 🌊"),
    ("A language model is", " a program that has learned which piece of text is likely to come next."),
    ("In Python, a coroutine is", " a function that can pause at await and continue later. 🐍"),
    ("A list of fruits:", "\n- apple 🍎\n- banana 🍌\n- cherry 🍒\n- orange 🍊\n- grape 🍇\n- strawberry 🍓"),
    ("A shopping list:", "\n1. bread 🍞\n2. milk 🥛\n3. eggs 🥚\n4. cheese 🧀\n5. coffee ☕"),
    (
        "Dear friend,",
        "\nthank you for your letter. I am well, and the garden is full of flowers. 🌷\nSee you soon,\nAda",
    ),
)

CODE = (
    ("def add(a, b):", "\n    return a + b\n"),
    ("def square(x):", "\n    return x * x\n"),
    ("def greet(name):", '\n    print(f"Hello, {name}!")\n'),
    ("def is_even(n):", "\n    return n % 2 == 0\n"),
    (
        "def factorial(n):",
        "\n    result = 1\n    for i in range(2, n + 1):\n        result = result * i\n    return result\n",
    ),
    (
        "def fibonacci(n):",
        "\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
    ),
    (
        "import asyncio",
        '\n\nasync def main():\n    await asyncio.sleep(1)\n    \
print("done")\n\nasyncio.run(main())\n',
    ),
    ("SELECT", " name, city FROM people WHERE age > 30 ORDER BY name;"),
    ("<html>", "\n  <body>\n    <h1>Hello, world!</h1>\n  </body>\n</html>\n"),
    ("print(", '"Hello, world!")\n'),
)


def _read_pairs(table: str) -> tuple[tuple[str, str], ...]:
    """The `left|right` entries of a table; a line without a bar continues the answer above it."""
    pairs: list[tuple[str, str]] = []
    for line in table.strip().splitlines():
        left, bar, right = line.partition("|")
        if bar:
            pairs.append((left, right))
        else:
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]}\n{line}")
    return tuple(pairs)


QUESTIONS = _read_pairs(_QUESTIONS)
SMALL_TALK = _read_pairs(_SMALL_TALK)
EMOJI = _read_pairs(_EMOJI)
