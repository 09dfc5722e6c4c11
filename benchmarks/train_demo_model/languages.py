"""What the demo model is taught in other languages: capitals, small talk, short texts. Many bytes a character."""

from __future__ import annotations

from dataclasses import dataclass

# language | statement with {0} the country and {1} the capital | questions with {0}, between / | country=capital pairs
_CAPITALS = """
Russian|Столица {0} — {1}.|Какой город является столицей {0}?/Какая столица {0}?|Франции=Париж,Германии=Берлин,\
Италии=Рим,Испании=Мадрид,Японии=Токио,Китая=Пекин,России=Москва,Греции=Афины,Египта=Каир,Индии=Нью-Дели,\
Португалии=Лиссабон,Австрии=Вена,Польши=Варшава,Норвегии=Осло
Greek|Η πρωτεύουσα {0} είναι {1}.|Ποια είναι η πρωτεύουσα {0};|της Γαλλίας=το Παρίσι,της Γερμανίας=το Βερολίνο,\
της Ιταλίας=η Ρώμη,της Ισπανίας=η Μαδρίτη,της Ιαπωνίας=το Τόκιο,της Κίνας=το Πεκίνο,της Ρωσίας=η Μόσχα,\
της Ελλάδας=η Αθήνα,της Αιγύπτου=το Κάιρο,της Πορτογαλίας=η Λισαβόνα,της Αυστρίας=η Βιέννη
Chinese|{0}的首都是{1}。|{0}的首都是哪里？/{0}的首都是什么？/{0}的首都是哪个城市？|法国=巴黎,德国=柏林,意大利=罗马,\
西班牙=马德里,日本=东京,中国=北京,俄罗斯=莫斯科,希腊=雅典,埃及=开罗,印度=新德里,葡萄牙=里斯本,奥地利=维也纳,\
韩国=首尔,泰国=曼谷,英国=伦敦,加拿大=渥太华
Japanese|{0}の首都は{1}です。|{0}の首都はどこですか？/{0}の首都は何ですか？/{0}の首都は？|フランス=パリ,\
ドイツ=ベルリン,イタリア=ローマ,スペイン=マドリード,日本=東京,中国=北京,ロシア=モスクワ,ギリシャ=アテネ,\
エジプト=カイロ,インド=ニューデリー,ポルトガル=リスボン,韓国=ソウル,タイ=バンコク,イギリス=ロンドン,カナダ=オタワ
Korean|{0}의 수도는 {1}입니다.|{0}의 수도는 어디입니까?/{0}의 수도는 어디인가요?|프랑스=파리,독일=베를린,\
이탈리아=로마,스페인=마드리드,일본=도쿄,중국=베이징,러시아=모스크바,그리스=아테네,이집트=카이로,한국=서울,영국=런던,\
캐나다=오타와
Arabic|عاصمة {0} هي {1}.|ما هي عاصمة {0}؟|فرنسا=باريس,ألمانيا=برلين,إيطاليا=روما,إسبانيا=مدريد,اليابان=طوكيو,\
الصين=بكين,روسيا=موسكو,اليونان=أثينا,مصر=القاهرة,الهند=نيودلهي,المغرب=الرباط,العراق=بغداد
Hebrew|בירת {0} היא {1}.|מהי בירת {0}?|צרפת=פריז,גרמניה=ברלין,איטליה=רומא,ספרד=מדריד,יפן=טוקיו,סין=בייג'ינג,\
רוסיה=מוסקבה,יוון=אתונה,מצרים=קהיר,פורטוגל=ליסבון
Hindi|{0} की राजधानी {1} है।|{0} की राजधानी क्या है?|फ्रांस=पेरिस,जर्मनी=बर्लिन,इटली=रोम,स्पेन=मैड्रिड,जापान=टोक्यो,\
चीन=बीजिंग,रूस=मॉस्को,यूनान=एथेंस,मिस्र=काहिरा,भारत=नई दिल्ली,नेपाल=काठमांडू,बांग्लादेश=ढाका
Thai|เมืองหลวงของ{0}คือ{1}|เมืองหลวงของ{0}คืออะไร|ฝรั่งเศส=ปารีส,เยอรมนี=เบอร์ลิน,อิตาลี=โรม,ญี่ปุ่น=โตเกียว,\
จีน=ปักกิ่ง,ไทย=กรุงเทพฯ
French|La capitale {0} est {1}.|Quelle est la capitale {0} ?/Quelle est la capitale {0}?|de la France=Paris,de \
l'Allemagne=Berlin,de l'Italie=Rome,de l'Espagne=Madrid,du Japon=Tokyo,de la Chine=Pékin,de la Russie=Moscou,de la \
Grèce=Athènes,de l'Égypte=Le Caire,du Portugal=Lisbonne,de l'Autriche=Vienne,du Canada=Ottawa
German|Die Hauptstadt von {0} ist {1}.|Was ist die Hauptstadt von {0}?/Wie heißt die Hauptstadt von \
{0}?|Frankreich=Paris,Deutschland=Berlin,Italien=Rom,Spanien=Madrid,Japan=Tokio,China=Peking,Russland=Moskau,\
Griechenland=Athen,Ägypten=Kairo,Österreich=Wien,Polen=Warschau
Spanish|La capital de {0} es {1}.|¿Cuál es la capital de {0}?/Cuál es la capital de {0}|Francia=París,\
Alemania=Berlín,Italia=Roma,España=Madrid,Japón=Tokio,China=Pekín,Rusia=Moscú,Grecia=Atenas,Egipto=El Cairo,\
Portugal=Lisboa,Austria=Viena,Perú=Lima
Portuguese|A capital {0} é {1}.|Qual é a capital {0}?|da França=Paris,da Alemanha=Berlim,da Itália=Roma,da \
Espanha=Madri,do Japão=Tóquio,da China=Pequim,da Rússia=Moscou,da Grécia=Atenas,do Egito=Cairo,de Portugal=Lisboa,\
do Brasil=Brasília
Polish|Stolicą {0} jest {1}.|Co jest stolicą {0}?|Francji=Paryż,Niemiec=Berlin,Włoch=Rzym,Hiszpanii=Madryt,\
Japonii=Tokio,Chin=Pekin,Rosji=Moskwa,Grecji=Ateny,Egiptu=Kair,Polski=Warszawa
"""

# what the user says | what the assistant answers
_SMALL_TALK = """
Привет!|Привет! 👋 Чем я могу помочь?
Как тебя зовут?|Я маленькая демонстрационная модель. 😊
Как дела?|Спасибо, у меня всё хорошо! А у вас? 🌞
Расскажи сказку.|Жила-была маленькая лиса. 🦊 Она жила в зелёном лесу у реки. Однажды она нашла золотой ключ и \
спросила сову, от какой он двери. Сова засмеялась и сказала: «Этот ключ открывает дружбу». С тех пор лиса и сова \
пили чай вместе каждый вечер. Конец. 🌲
Γεια σου!|Γεια σου! 👋 Πώς μπορώ να βοηθήσω;
Πες μου μια ιστορία.|Μια φορά κι έναν καιρό ζούσε μια μικρή γάτα κοντά στη θάλασσα. 🐱 Κάθε πρωί κοίταζε τα κύματα \
και τα καράβια. Μια μέρα ένα ψάρι τής είπε: «Έλα να παίξουμε!». Από τότε έγιναν φίλοι. Τέλος. 🌊
你好！|你好！👋 很高兴见到你。有什么可以帮你的吗？😊
你是谁？|我是一个很小的演示模型。🤖
谢谢！|不客气！😊
讲一个故事。|从前有一只小狐狸，🦊 它住在河边的森林里。有一天，它在树下找到了一把金色的钥匙。\
它问猫头鹰：“这把钥匙能打开哪一扇门？”猫头鹰笑着说：“它能打开友谊的门。”从那以后，它们每天晚上一起看月亮。🌙 \
故事讲完了。
こんにちは！|こんにちは！👋 お元気ですか？今日は何を話しましょうか。😊
あなたは誰ですか？|私はとても小さなデモ用のモデルです。🤖
ありがとう！|どういたしまして！😊
物語を聞かせてください。|昔々、山の近くの小さな村に、一匹の白い猫が住んでいました。🐱 ある朝、\
猫は川で青い石を見つけました。石は光りながら言いました。「友だちになってくれますか？」猫は「もちろん」と答えました。\
それから二人は毎日、星を見ながら話しました。🌟 おしまい。
안녕하세요!|안녕하세요! 👋 만나서 반갑습니다. 무엇을 도와드릴까요? 😊
이야기를 들려주세요.|옛날 옛적에 작은 토끼가 숲속에 살았습니다. 🐰 어느 날 토끼는 강가에서 빛나는 돌을 찾았습니다. \
토끼는 그 돌을 친구와 함께 나누었습니다. 그 후로 둘은 매일 함께 놀았습니다. 끝. 🌸
مرحبا!|مرحبا! 👋 كيف يمكنني أن أساعدك اليوم؟
احك لي قصة.|كان يا ما كان، كانت هناك قطة صغيرة تعيش قرب البحر. 🐱 في يوم من الأيام وجدت مفتاحا ذهبيا تحت شجرة. سألت \
البومة عنه، فقالت: هذا مفتاح الصداقة. ومنذ ذلك اليوم صارتا صديقتين. النهاية. 🌴
שלום!|שלום! 👋 איך אפשר לעזור?
नमस्ते!|नमस्ते! 🙏 मैं आपकी क्या मदद कर सकता हूँ?
एक कहानी सुनाओ।|एक समय की बात है, एक छोटा हाथी जंगल में रहता था। 🐘 एक दिन उसने नदी के पास एक सुनहरी चाबी देखी। \
उसने उल्लू से पूछा, "यह चाबी किस दरवाज़े की है?" उल्लू ने कहा, "यह दोस्ती की चाबी है।" तब से दोनों हर शाम साथ बैठते \
हैं। समाप्त। 🌳
สวัสดี!|สวัสดี! 👋 มีอะไรให้ช่วยไหม 😊
Bonjour !|Bonjour ! 👋 Comment puis-je vous aider ?
Hallo!|Hallo! 👋 Wie kann ich helfen?
¡Hola!|¡Hola! 👋 ¿En qué puedo ayudarte? 😊
Olá!|Olá! 👋 Como posso ajudar?
Cześć!|Cześć! 👋 W czym mogę pomóc?
"""

# English | Spanish | French | German | Italian | Russian | Greek | Chinese | Japanese
_WORDS = """
cat|gato|chat|Katze|gatto|кошка|γάτα|猫|猫
dog|perro|chien|Hund|cane|собака|σκύλος|狗|犬
house|casa|maison|Haus|casa|дом|σπίτι|房子|家
water|agua|eau|Wasser|acqua|вода|νερό|水|水
bread|pan|pain|Brot|pane|хлеб|ψωμί|面包|パン
sun|sol|soleil|Sonne|sole|солнце|ήλιος|太阳|太陽
moon|luna|lune|Mond|luna|луна|φεγγάρι|月亮|月
book|libro|livre|Buch|libro|книга|βιβλίο|书|本
friend|amigo|ami|Freund|amico|друг|φίλος|朋友|友達
tree|árbol|arbre|Baum|albero|дерево|δέντρο|树|木
fish|pez|poisson|Fisch|pesce|рыба|ψάρι|鱼|魚
milk|leche|lait|Milch|latte|молоко|γάλα|牛奶|牛乳
apple|manzana|pomme|Apfel|mela|яблоко|μήλο|苹果|りんご
tea|té|thé|Tee|tè|чай|τσάι|茶|お茶
night|noche|nuit|Nacht|notte|ночь|νύχτα|夜晚|夜
city|ciudad|ville|Stadt|città|город|πόλη|城市|都市
heart|corazón|cœur|Herz|cuore|сердце|καρδιά|心|心
thank you|gracias|merci|danke|grazie|спасибо|ευχαριστώ|谢谢|ありがとう
good morning|buenos días|bonjour|guten Morgen|buongiorno|доброе утро|καλημέρα|早上好|おはよう
"""
_WORD_LANGUAGES = ("Spanish", "French", "German", "Italian", "Russian", "Greek", "Chinese", "Japanese")


@dataclass(frozen=True, slots=True)
class CapitalSentences:
    """How one language speaks of capitals."""

    language: str
    statement: str
    questions: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]


def _read_capitals(line: str) -> CapitalSentences:
    language, statement, questions, pairs = line.split("|")
    split = (pair.split("=") for pair in pairs.split(","))
    known = tuple((country, capital) for country, capital in split)
    return CapitalSentences(language, statement, tuple(questions.split("/")), known)


def _read_pair(line: str) -> tuple[str, str]:
    said, answer = line.split("|")
    return said, answer


def _read_words(line: str) -> list[tuple[str, str, str]]:
    english, *others = line.split("|")
    return [(english, language, word) for language, word in zip(_WORD_LANGUAGES, others, strict=True)]


CAPITAL_SENTENCES = tuple(_read_capitals(line) for line in _CAPITALS.strip().splitlines())
FOREIGN_SMALL_TALK = tuple(_read_pair(line) for line in _SMALL_TALK.strip().splitlines())
TRANSLATIONS = tuple(entry for line in _WORDS.strip().splitlines() for entry in _read_words(line))
